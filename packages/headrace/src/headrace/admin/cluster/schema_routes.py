"""`/schemas`: subjects of the schema registry, and their versions."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from headrace import errors
from headrace.admin.cluster.registered_schemas import RegisteredSchemas, SubjectList, SubjectVersions, topic_of
from headrace.http.auth.principals import ADMIN, READ
from headrace.http.endpoint import Call, Endpoint, Errors, Rule, require

_READERS: Final = (READ, ADMIN)
_READ: Final = Rule(_READERS, "consume")
_ERRORS: Final[Errors] = (errors.RegistryUnavailable,)
_Text = Annotated[str, Meta(max_length=1000)]
_Offset = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class SubjectQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Selects subjects by name."""

    prefix: _Text = ""
    """How the name begins."""
    contains: _Text = ""
    """What the name has anywhere, in any case."""
    offset: _Offset = 0
    """Matching subjects to leave out, by name."""
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class VersionQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Selects versions of a subject."""

    offset: _Offset = 0
    """Versions to leave out, the newest first."""
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class SchemaEndpoints:
    """Subjects of the schema registry. Who may read a topic may read its schemas."""

    def __init__(self, schemas: RegisteredSchemas) -> None:
        self._schemas = schemas

    @Endpoint(
        "GET",
        "/schemas",
        "listSchemas",
        "Subjects of the schema registry that the caller may read, with the latest version of each",
        _READ,
        errors=_ERRORS,
    )
    async def subjects(self, call: Call[None, SubjectQuery]) -> SubjectList:
        query, principal = call.query, call.request.caller.principal
        part = query.contains.lower()

        def selected(subject: str) -> bool:
            fits = subject.startswith(query.prefix) and part in subject.lower()
            return fits and (principal is None or principal.may(_READERS, "consume", topic_of(subject) or subject))

        return await self._schemas.subjects(selected, query.offset, query.limit)

    @Endpoint(
        "GET",
        "/schemas/{subject}",
        "showSchema",
        "Versions of a subject with their texts, the newest first",
        _READ,
        errors=(*_ERRORS, errors.NotFound),
    )
    async def versions(self, call: Call[None, VersionQuery]) -> SubjectVersions:
        subject = call.parameters["subject"]
        if subject in (".", "..") or not subject.isprintable():  # a path of the registry cannot name it
            raise errors.NotFound(f"subject {subject[:60]!r} cannot be read over HTTP: ask the registry itself")
        require(call.request, _READERS, "consume", topic_of(subject) or subject)
        return await self._schemas.versions(subject, call.query.offset, call.query.limit)
