"""What the schema registry has: its subjects, and the versions of one; read only, and never from the cache."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

import msgspec

from headrace.errors import InvalidRequest, NotFound, RegistryUnavailable, SchemaNotFound, TooManyRequests
from headrace.formats.registry import Reference, SchemaRegistry
from headrace.kafka.names import check_topic

_REQUESTS: Final = 8
"""Requests at a time that this process sends to the registry for these views."""
_VIEWS: Final = 4
_LIMIT_SECONDS: Final = 8.0
_TEXT_CHARACTERS: Final = 4_000_000
_MISSING: Final = "subject {!r} is not in the schema registry: see GET /schemas"


class SubjectView(msgspec.Struct):
    """A subject, and its latest version."""

    subject: str
    topic: str
    """The topic by the strategy TopicName (`{topic}-key`, `{topic}-value`); empty for other names."""
    version: int
    """The latest one; 0 if it could not be read."""
    id: int
    type: str
    """`AVRO`, `JSON` or `PROTOBUF`."""
    compatibility: str
    """That of the subject, else that of the registry, in its word."""
    problem: str = ""
    """What of it could not be read, and why."""


class SubjectList(msgspec.Struct):
    """Subjects that the caller may read, by name."""

    total: int
    """How many match."""
    subjects: list[SubjectView]


class VersionView(msgspec.Struct):
    """A version of a subject."""

    version: int
    id: int
    type: str
    schema: str
    """Its text as it was registered."""
    references: list[Reference]


class SubjectVersions(msgspec.Struct):
    """Versions of a subject, the newest first."""

    subject: str
    topic: str
    compatibility: str
    problem: str
    """Why the compatibility level is missing; empty if it is not."""
    total: int
    """How many versions it has."""
    versions: list[VersionView]
    """After four million characters of texts no further one is added."""


def topic_of(subject: str) -> str:
    """Return the topic of a subject by the strategy TopicName; empty if it has another name."""
    for ending in ("-key", "-value"):
        if subject.endswith(ending):
            with contextlib.suppress(InvalidRequest):
                return check_topic(subject.removesuffix(ending))
    return ""


class RegisteredSchemas:
    """Reads a registry, a few requests at a time."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._requests = asyncio.Semaphore(_REQUESTS)
        self._views = 0

    async def subjects(self, selected: Callable[[str], bool], offset: int, limit: int) -> SubjectList:
        """Return the subjects whose names are selected.

        Raises:
            RegistryUnavailable: The registry does not answer, or not in time.
            TooManyRequests: This process reads it for too many others.
        """
        async with self._reading():
            names = sorted(filter(selected, await self._registry.subjects()))
            found = await asyncio.gather(*map(self._subject, names[offset : offset + limit]))
            return SubjectList(len(names), [one for one in found if one])

    async def versions(self, subject: str, offset: int, limit: int) -> SubjectVersions:
        """Return versions of a subject; raises as `subjects`, and NotFound if the registry does not have it."""
        async with self._reading():
            try:
                numbers = sorted(await self._registry.version_numbers(subject), reverse=True)
            except SchemaNotFound as cause:
                raise NotFound(_MISSING.format(subject[:200]), subject=subject) from cause
            compatibility, problem = await self._compatibility(subject)
            shown: list[VersionView] = []
            for some in _batches(numbers[offset : offset + limit]):
                found = await asyncio.gather(*(self._version(subject, number) for number in some))
                shown += [one for one in found if one]
                if sum(len(one.schema) for one in shown) > _TEXT_CHARACTERS:
                    break
            return SubjectVersions(subject, topic_of(subject), compatibility, problem, len(numbers), shown)

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        if self._views >= _VIEWS:
            raise TooManyRequests(f"{_VIEWS} reads of the schema registry are in progress here; try again later")
        self._views += 1
        try:
            async with asyncio.timeout(_LIMIT_SECONDS):
                yield
        except TimeoutError as cause:
            raise RegistryUnavailable(
                f"the schema registry did not send all of it within {_LIMIT_SECONDS:g} s: set a smaller limit"
            ) from cause
        finally:
            self._views -= 1

    async def _subject(self, name: str) -> SubjectView | None:
        try:
            async with self._requests:
                latest = await self._registry.read_version(name)
        except SchemaNotFound:  # deleted meanwhile
            return None
        except RegistryUnavailable as error:  # of this subject; the list itself was readable
            return SubjectView(name, topic_of(name), 0, 0, "", "", error.description)
        schema = latest.schema
        level, problem = await self._compatibility(name)
        return SubjectView(name, topic_of(name), latest.number, schema.id, schema.type, level, problem)

    async def _compatibility(self, subject: str) -> tuple[str, str]:
        """Return the compatibility level, or why there is none: reading it may need a right of its own."""
        try:
            async with self._requests:
                return await self._registry.compatibility_of(subject), ""
        except (SchemaNotFound, RegistryUnavailable) as error:
            return "", error.description

    async def _version(self, subject: str, number: int) -> VersionView | None:
        try:
            async with self._requests:
                schema = (await self._registry.read_version(subject, number)).schema
        except SchemaNotFound:  # deleted meanwhile
            return None
        return VersionView(number, schema.id, schema.type, schema.text, [*schema.references])


def _batches(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    return (numbers[start : start + _REQUESTS] for start in range(0, len(numbers), _REQUESTS))
