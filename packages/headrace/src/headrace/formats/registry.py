"""The client of the schema registry, which caches every response (Confluent Schema Registry API).

A schema of an id or of a version never changes, so it does not expire. The latest version of a subject and a "not
found" expire after 30 seconds. Concurrent callers of one key share one request. While the registry is down, expired
responses are used.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import quote

import msgspec
from cachetools import LRUCache

from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import FormatError, HeadraceError, RegistryUnavailable, SchemaInvalid, SchemaNotFound
from headrace.runtime import Clock
from headrace.runtime.tls import ClientTlsFiles

if TYPE_CHECKING:
    import aiohttp

_CACHE_BYTES = 16_777_216
_ENTRY_BYTES = 8192
"""Each entry counts for at least this, which bounds their number too."""
_NOT_FOUND = (40401, 40402, 40403)
_NEVER = float("inf")


class Reference(msgspec.Struct, frozen=True):
    """Another schema that a schema refers to."""

    name: str
    """A full name in Avro, a URI in JSON Schema, the imported file in Protobuf."""
    subject: str
    version: Annotated[int, msgspec.Meta(ge=1)]


class RegisteredSchema(NamedTuple):
    """A registered schema."""

    id: int
    type: str
    """`AVRO`, `JSON` or `PROTOBUF`."""
    text: str
    references: tuple[Reference, ...] = ()


class SubjectVersion(NamedTuple):
    """A version of a subject."""

    number: int
    schema: RegisteredSchema


class _RegistryResponse(msgspec.Struct):
    """Every field of a response that is read."""

    id: int = 0
    schema: str = ""
    schemaType: str | None = None  # noqa: N815 the registry's field
    references: tuple[Reference, ...] | None = None
    subject: str = ""
    version: int = 0
    compatibilityLevel: str = ""  # noqa: N815 the registry's field
    error_code: int = 0
    message: str = ""


_decode_response = msgspec.json.Decoder(_RegistryResponse).decode
_decode_versions = msgspec.json.Decoder(list[_RegistryResponse]).decode
_decode_names = msgspec.json.Decoder(list[str]).decode
_decode_numbers = msgspec.json.Decoder(list[int]).decode


class SchemaRegistry:
    """Looks schemas up and registers them; for use on one loop."""

    def __init__(self, settings: SchemaRegistryConfig, clock: Clock) -> None:
        """Prepare; connections are opened when needed, so the registry may be down.

        Raises:
            ConfigError: A file of TLS is not usable.
        """
        self._settings = settings
        self.tls = ClientTlsFiles("schema_registry.tls", settings.tls, clock) if settings.secure else None
        """Reads the files again when they change, if it is started."""
        self._url = settings.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._cache = _ResponseCache(settings.latest_seconds, clock)

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def check(self) -> None:
        """Send a cheap request, without the cache.

        Raises:
            RegistryUnavailable: It does not answer, or not like a registry.
        """
        await self._request("GET", "/config", "its configuration")

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema of an id.

        Raises:
            SchemaNotFound: The registry does not have it.
            RegistryUnavailable: It is not cached, and the registry does not answer.
        """
        path, what = f"/schemas/ids/{schema_id}", f"schema id {schema_id}"
        return await self._schema(("id", schema_id), _NEVER, path, what, schema_id)

    async def of_subject(
        self, subject: str, version: int | None = None, *, max_age_seconds: float | None = None
    ) -> RegisteredSchema:
        """Return one version of a subject, the latest by default; raises as `by_id`.

        Args:
            max_age_seconds: Age of a cached response about the latest version that is still used; 30 s by default.
        """
        number = "latest" if version is None else str(version)
        latest_seconds = self._settings.latest_seconds if max_age_seconds is None else max_age_seconds
        seconds = latest_seconds if version is None else _NEVER
        path, what = _version_of(subject, number)
        return await self._schema(("subject", subject, number), seconds, path, what)

    async def subjects(self) -> list[str]:
        """Return all subjects, without the cache.

        Raises:
            RegistryUnavailable: The registry does not answer.
        """
        found: list[str] = await self._request("GET", "/subjects", "its subjects", decode=_decode_names)
        return found

    async def version_numbers(self, subject: str) -> list[int]:
        """Return the numbers of a subject's versions, without the cache; raises as `by_id`."""
        path, what = f"{_path_of(subject)}/versions", f"subject {subject}"
        found: list[int] = await self._request("GET", path, what, decode=_decode_numbers)
        return found

    async def read_version(self, subject: str, number: int | None = None) -> SubjectVersion:
        """Return one version of a subject, the latest by default, without the cache; raises as `by_id`."""
        response = await self._request("GET", *_version_of(subject, "latest" if number is None else str(number)))
        return SubjectVersion(response.version, _schema_of(response, response.id))

    async def compatibility_of(self, subject: str) -> str:
        """Return the compatibility level of a subject, in the registry's word, without the cache; raises as `by_id`."""
        path = f"/config/{quote(subject, safe='')}?defaultToGlobal=true"
        level: str = (await self._request("GET", path, f"a compatibility level of {subject}")).compatibilityLevel
        return level

    async def _schema(
        self, key: Hashable, fresh_seconds: float, path: str, what: str, schema_id: int | None = None
    ) -> RegisteredSchema:
        async def request() -> RegisteredSchema:
            response = await self._request("GET", path, what)
            return _schema_of(response, response.id if schema_id is None else schema_id)

        found: RegisteredSchema = await self._cache.get(key, fresh_seconds, request)
        return found

    async def subjects_of(self, schema_id: int) -> frozenset[str]:
        """Return the subjects under which an id is registered; raises as `by_id`."""

        async def request() -> frozenset[str]:
            path = f"/schemas/ids/{schema_id}/versions"
            versions = await self._request("GET", path, f"schema id {schema_id}", decode=_decode_versions)
            return frozenset(version.subject for version in versions)

        found: frozenset[str] = await self._cache.get(("subjects", schema_id), self._settings.latest_seconds, request)
        return found

    async def texts_of(self, references: Iterable[Reference], found: dict[str, str] | None = None) -> dict[str, str]:
        """Return the texts of all referenced schemas by name, each after those that it refers to; raises as `by_id`."""
        found = {} if found is None else found
        for reference in references:
            if reference.name not in found:
                schema = await self.of_subject(reference.subject, reference.version)
                found[reference.name] = ""  # ends a circle of references
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
        """Return the id of a schema's text under a subject; register it if it is not there.

        Raises:
            SchemaInvalid: The registry refuses the text: not valid, or not compatible with the subject's latest one.
            SchemaNotFound: It is not there, and `create` is false.
            RegistryUnavailable: The registry does not answer.
        """

        async def request() -> RegisteredSchema:
            path = _path_of(subject)
            what = f"this schema under subject {subject}"
            body: dict[str, Any] = {"schema": text, "schemaType": schema_type}
            if references:
                body["references"] = msgspec.to_builtins(references)
            try:
                response = await self._request("POST", f"{path}?normalize=true", what, body, SchemaInvalid)
            except SchemaNotFound:
                if not create:
                    raise
                response = await self._request("POST", f"{path}/versions?normalize=true", what, body, SchemaInvalid)
                self._cache.forget(("subject", subject, "latest"))
            return RegisteredSchema(response.id, schema_type, text, references)

        digest = hashlib.sha256(text.encode()).digest()  # the cache must not hold refused texts
        key = ("text", subject, schema_type, digest, references, create)
        found: RegisteredSchema = await self._cache.get(key, _NEVER, request)
        return found

    async def _request(
        self,
        method: str,
        path: str,
        what: str,
        body: dict[str, Any] | None = None,
        refusal: type[FormatError] = SchemaNotFound,
        decode: Callable[[bytes], Any] = _decode_response,
    ) -> Any:
        import aiohttp  # here, because most processes use no registry

        try:
            sent: dict[str, Any] = {"json": body, "headers": self._settings.login(), "allow_redirects": False}
            async with self._open_session().request(method, self._url + path, **sent) as response:
                content, status = await response.read(), response.status
            if status in (401, 403):
                advice = self._settings.login_advice(status, "to read and register schemas")
                raise self._unavailable(f"it refuses the login (HTTP {status})", advice)
            if status < 300:
                return decode(content)
            problem = _decode_response(content)
        except TimeoutError as cause:
            raise self._unavailable(f"no response within {self._settings.timeout_seconds:g} s") from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise self._unavailable(self._settings.problem(cause)) from cause
        except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
            raise self._unavailable(
                f"its response to {method} {path} (HTTP {status}) is not that of a schema registry"
            ) from cause
        if problem.error_code in _NOT_FOUND:
            raise SchemaNotFound(f"the schema registry does not have {what}: register it, or name another one")
        if status in (409, 422):
            raise refusal(f"the schema registry refused {what}: {problem.message[:500]}")
        raise self._unavailable(f"it answered HTTP {status}: {problem.message[:200]}")

    def _unavailable(self, why: str, advice: str = "") -> RegistryUnavailable:
        advice = advice or "Start it (headrace dev up), or correct schema_registry.url"
        text = f"the schema registry at {self._url} is not available: {why}. Nothing was sent. {advice}"
        return RegistryUnavailable(text, url=self._url)

    def _open_session(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout_seconds),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(ssl=self.tls.context if self.tls else True),
            )
        return self._session


def _path_of(subject: str) -> str:
    return f"/subjects/{quote(subject, safe='')}"


def _version_of(subject: str, number: str) -> tuple[str, str]:
    """Return the path of a version, and what it is in sentences."""
    return f"{_path_of(subject)}/versions/{number}", f"version {number} of subject {subject}"


def _schema_of(response: _RegistryResponse, schema_id: int) -> RegisteredSchema:
    return RegisteredSchema(schema_id, response.schemaType or "AVRO", response.schema, response.references or ())


class _ResponseCache:
    """Responses of the registry by typed key, with their age; a "not found" is a response too."""

    def __init__(self, not_found_seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._not_found_seconds = not_found_seconds
        self._entries: LRUCache[Hashable, tuple[float, Any]] = LRUCache(_CACHE_BYTES, _size_of)
        self._flights: dict[Hashable, asyncio.Future[Any]] = {}

    async def get(self, key: Hashable, fresh_seconds: float, request: Callable[[], Awaitable[Any]]) -> Any:
        """Return the response of a key; `request` is called unless a fresh one is cached."""
        known = self._entries.get(key)
        if known:
            requested_at, response = known
            is_error = isinstance(response, HeadraceError)
            limit = min(self._not_found_seconds, fresh_seconds) if is_error else fresh_seconds
            if self._clock.monotonic() - requested_at < limit:
                return _value(response)
        try:
            return await self._share(key, request)
        except RegistryUnavailable:
            if not known or isinstance(known[1], HeadraceError):
                raise
            self._keep(key, known[1])  # otherwise each request would wait for a registry that is down
            return known[1]

    def forget(self, key: Hashable) -> None:
        self._entries.pop(key, None)

    async def _share(self, key: Hashable, request: Callable[[], Awaitable[Any]]) -> Any:
        flight = self._flights.get(key)
        if flight:
            return await asyncio.shield(flight)
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        # If this task is cancelled, the others get this error instead of a cancellation.
        response: Any = RegistryUnavailable("the look-up was cancelled: send the request again")
        try:
            response = await request()
        except (FormatError, RegistryUnavailable) as error:
            response = error
        finally:
            del self._flights[key]
            if isinstance(response, HeadraceError):
                flight.set_exception(response)
                flight.exception()  # marks it as retrieved: perhaps no task waits for it
            else:
                flight.set_result(response)
        if not isinstance(response, RegistryUnavailable):
            self._keep(key, response)
        return _value(response)

    def _keep(self, key: Hashable, response: Any) -> None:
        self._entries[key] = self._clock.monotonic(), response


def _size_of(entry: tuple[float, Any]) -> int:
    text = len(entry[1].text) if isinstance(entry[1], RegisteredSchema) else 0
    return min(max(text, _ENTRY_BYTES), _CACHE_BYTES)


def _value(response: Any) -> Any:
    if isinstance(response, HeadraceError):
        raise response.with_traceback(None)  # the shared error would collect the frames of every caller
    return response
