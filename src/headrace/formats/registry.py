"""The schema registry, asked as rarely as can be.

A schema of an id or of a version never changes, so it is kept for good; the latest version of a subject and a "not
found" are kept for `latest_seconds`. Several callers who want the same thing at once share one question. While the
registry is down, what is known is still answered. Source: Confluent Schema Registry API reference.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import FormatError, HeadraceError, RegistryUnavailable, SchemaInvalid, SchemaNotFound
from headrace.formats.kept import Kept
from headrace.lifecycle import Clock

T = TypeVar("T")
_ENTRIES = 2000
_TEXT_BYTES = 16_777_216
_NOT_FOUND = (40401, 40402, 40403)
_NEVER = float("inf")


class Reference(msgspec.Struct, frozen=True):
    """Another schema that a schema uses."""

    name: str
    """By which it is used: a full name in Avro, an address in JSON Schema, the imported file in Protobuf."""
    subject: str
    version: Annotated[int, msgspec.Meta(ge=1)]


class RegisteredSchema(NamedTuple):
    """A schema as the registry holds it."""

    id: int
    type: str
    """`AVRO`, `JSON` or `PROTOBUF`."""
    text: str
    references: tuple[Reference, ...] = ()


class _Answer(msgspec.Struct):
    """What any of the questions may bring."""

    id: int = 0
    schema: str = ""
    schemaType: str | None = None  # noqa: N815 the registry's word
    references: tuple[Reference, ...] | None = None
    subject: str = ""
    error_code: int = 0
    message: str = ""


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_places = msgspec.json.Decoder(list[_Answer]).decode


class SchemaRegistry:
    """Looks schemas up and registers them; for use on one loop."""

    def __init__(self, settings: SchemaRegistryConfig, clock: Clock) -> None:
        """Prepare; connections are opened when needed, so the registry may be down."""
        self._settings = settings
        self._url = settings.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._known: _Known[Any] = _Known(settings.latest_seconds, clock)

    async def close(self) -> None:
        """Close every connection."""
        if self._session:
            await self._session.close()
            self._session = None

    async def check(self) -> None:
        """Ask the registry anything at all.

        Raises:
            RegistryUnavailable: It does not answer, or not as a registry.
        """
        await self._ask("GET", "/config", "its configuration")

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema of an id.

        Raises:
            SchemaNotFound: The registry does not have it.
            RegistryUnavailable: It is not known here, and the registry does not answer.
        """

        async def ask() -> RegisteredSchema:
            answer = await self._ask("GET", f"/schemas/ids/{schema_id}", f"schema id {schema_id}")
            return _schema_of(schema_id, answer)

        found: RegisteredSchema = await self._known.get(("id", schema_id), _NEVER, ask)
        return found

    async def subjects_of(self, schema_id: int) -> frozenset[str]:
        """Return the subjects under which an id is registered; raises as `by_id`."""

        async def ask() -> frozenset[str]:
            path = f"/schemas/ids/{schema_id}/versions"
            places = await self._ask("GET", path, f"schema id {schema_id}", decode=_decode_places)
            return frozenset(place.subject for place in places)

        found: frozenset[str] = await self._known.get(("subjects", schema_id), self._settings.latest_seconds, ask)
        return found

    async def of_subject(self, subject: str, version: int | None = None) -> RegisteredSchema:
        """Return one version of a subject, the latest by default; raises as `by_id`."""
        number = "latest" if version is None else str(version)

        async def ask() -> RegisteredSchema:
            path = f"/subjects/{quote(subject, safe='')}/versions/{number}"
            answer = await self._ask("GET", path, f"version {number} of subject {subject}")
            return _schema_of(answer.id, answer)

        seconds = self._settings.latest_seconds if version is None else _NEVER
        found: RegisteredSchema = await self._known.get(("subject", subject, number), seconds, ask)
        return found

    async def texts_of(self, references: Iterable[Reference], found: dict[str, str] | None = None) -> dict[str, str]:
        """Return the texts of what a schema refers to by name, each after those that it refers to; raises as `by_id`.

        Args:
            references: Of the schema.
            found: What is known already, and is added to.
        """
        found = {} if found is None else found
        for reference in references:
            if reference.name not in found:
                schema = await self.of_subject(reference.subject, reference.version)
                found[reference.name] = ""  # so that a circle ends
                await self.texts_of(schema.references, found)
                del found[reference.name]
                found[reference.name] = schema.text
        return found

    async def register(
        self,
        subject: str,
        text: str,
        schema_type: str = "AVRO",
        references: tuple[Reference, ...] = (),
        *,
        create: bool = True,
    ) -> RegisteredSchema:
        """Return the id of a schema's text under a subject, registering it when it is not there yet.

        Raises:
            SchemaInvalid: The registry refuses the text: no schema, or not compatible with the subject's latest one.
            SchemaNotFound: It is not there, and `create` is false.
            RegistryUnavailable: The registry does not answer.
        """

        async def ask() -> RegisteredSchema:
            path = f"/subjects/{quote(subject, safe='')}"
            what = f"this schema under subject {subject}"
            body: dict[str, Any] = {"schema": text, "schemaType": schema_type}
            if references:
                body["references"] = msgspec.to_builtins(references)
            try:
                answer = await self._ask("POST", f"{path}?normalize=true", what, body, SchemaInvalid)
            except SchemaNotFound:
                if not create:
                    raise
                answer = await self._ask("POST", f"{path}/versions?normalize=true", what, body, SchemaInvalid)
                self._known.forget(("subject", subject, "latest"))
            return RegisteredSchema(answer.id, schema_type, text, references)

        digest = hashlib.sha256(text.encode()).digest()  # a text that is refused is remembered, and not kept
        key = ("text", subject, schema_type, digest, references, create)
        found: RegisteredSchema = await self._known.get(key, _NEVER, ask)
        return found

    async def _ask(
        self,
        method: str,
        path: str,
        what: str,
        body: dict[str, Any] | None = None,
        refusal: type[FormatError] = SchemaNotFound,
        decode: Callable[[bytes], Any] = _decode_answer,
    ) -> Any:
        try:
            async with self._open_session().request(method, self._url + path, json=body) as response:
                content, status = await response.read(), response.status
            if status < 300:
                return decode(content)
            problem = _decode_answer(content)
        except TimeoutError as cause:
            raise self._unavailable(f"no answer within {self._settings.timeout_seconds:g} s") from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise self._unavailable(str(cause) or type(cause).__name__) from cause
        except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
            raise self._unavailable(f"its answer to {method} {path} (HTTP {status}) is not of that API") from cause
        if problem.error_code in _NOT_FOUND:
            raise SchemaNotFound(f"the schema registry does not have {what}: register it or name another")
        if status in (409, 422):
            raise refusal(f"the schema registry refused {what}: {problem.message[:500]}")
        raise self._unavailable(f"it answered HTTP {status}: {problem.message[:200]}")

    def _unavailable(self, why: str) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"the schema registry at {self._url} does not serve: {why}. Nothing was sent. Start it (headrace dev up), "
            "or correct schema_registry.url, username and password",
            url=self._url,
        )

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
            if self._settings.username:
                pair = f"{self._settings.username}:{self._settings.password.get_secret_value()}"
                headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout_seconds),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _schema_of(schema_id: int, answer: _Answer) -> RegisteredSchema:
    return RegisteredSchema(schema_id, answer.schemaType or "AVRO", answer.schema, answer.references or ())


class _Known(Generic[T]):
    """Answers by typed key, bounded, with their age; a "not found" is an answer too."""

    def __init__(self, not_found_seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._not_found_seconds = not_found_seconds
        self._entries: Kept[tuple[float, T | HeadraceError]] = Kept(_ENTRIES, _TEXT_BYTES)
        self._flights: dict[Hashable, asyncio.Future[T]] = {}

    async def get(self, key: Hashable, fresh_seconds: float, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a key, asking when there is none that is fresh."""
        known = self._entries.use(key)
        if known:
            asked_at, answer = known
            limit = self._not_found_seconds if isinstance(answer, HeadraceError) else fresh_seconds
            if self._clock.monotonic() - asked_at < limit:
                return _value(answer)
        try:
            return await self._share(key, ask)
        except RegistryUnavailable:
            if not known or isinstance(known[1], HeadraceError):
                raise
            self._keep(key, known[1])  # so that not every request waits for a registry that is down
            return known[1]

    def forget(self, key: Hashable) -> None:
        """Ask again next time."""
        self._entries.drop(key)

    async def _share(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        flight = self._flights.get(key)
        if flight:
            return await asyncio.shield(flight)
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        # What the others get when the one who asks is cancelled: that is his end, not theirs.
        answer: T | HeadraceError = RegistryUnavailable("the look-up was broken off: send the request again")
        try:
            answer = await ask()
        except (FormatError, RegistryUnavailable) as error:
            answer = error
        finally:
            del self._flights[key]
            if isinstance(answer, HeadraceError):
                flight.set_exception(answer)
                flight.exception()  # maybe nobody waits for it
            else:
                flight.set_result(answer)
        if not isinstance(answer, RegistryUnavailable):
            self._keep(key, answer)
        return _value(answer)

    def _keep(self, key: Hashable, answer: T | HeadraceError) -> None:
        size = len(answer.text) if isinstance(answer, RegisteredSchema) else 0
        self._entries.put(key, (self._clock.monotonic(), answer), size)


def _value(answer: T | HeadraceError) -> T:
    if isinstance(answer, HeadraceError):
        raise answer.with_traceback(None)  # the same error is raised many times, and would gather every caller's frames
    return answer
