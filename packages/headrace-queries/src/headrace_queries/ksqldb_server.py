"""A client of a ksqlDB server: it runs statements at `/query-stream` and gives their rows as they arrive.

Source: ksqlDB's public pages on its REST API.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from headrace.errors import HeadraceError, KsqldbUnavailable, StatementRejected
from headrace.runtime import Clock
from headrace.runtime.tls import ClientTlsFiles
from headrace_queries.ksqldb import BLANK_SECONDS, DELIMITED, KSQL_JSON, KsqlColumn
from headrace_queries.ksqldb_config import KsqldbConfig

MAX_LINE_BYTES: Final = 4_194_304
"""Longest line of a response."""
_MAX_ERROR_BYTES: Final = 65_536
_HTTP2_ONLY: Final = 40004
_KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
)
"""A push query may be silent for days: the kernel finds out that the server is gone."""

log = logging.getLogger(__name__)


class _Header(msgspec.Struct):
    """The first line of a response."""

    columnNames: list[str]  # noqa: N815 ksqlDB's field
    columnTypes: list[str]  # noqa: N815
    queryId: str | None = None  # noqa: N815


class _Problem(msgspec.Struct):
    """An error, as a body or as a line; other objects between the rows have no message."""

    message: str = ""
    error_code: int = 0


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_problem = msgspec.json.Decoder(_Problem).decode


class ServerRows:
    """The rows of one statement, in batches as they arrive. Iterate once."""

    def __init__(self, lines: AsyncIterator[list[bytes]], header: _Header, rest: list[bytes]) -> None:
        """Read the header; ValueError if its names and types differ in number."""
        self.query_id = header.queryId or ""
        """Empty if the server gives none to pull queries."""
        pairs = zip(header.columnNames, header.columnTypes, strict=True)
        self.columns = [KsqlColumn(name, kind) for name, kind in pairs]
        self.ended = False
        """Whether the response is complete, or an error ended it."""
        self._closing = False
        self._lines = lines
        self._rest = rest

    def close(self) -> None:
        """End the rows at the next moment without one; the end of the context closes the query on the server."""
        self._closing = True

    async def __aiter__(self) -> AsyncIterator[list[bytes]]:
        """Yield rows; each is the text of a JSON array. An empty batch is a second without rows.

        Raises:
            StatementRejected: The server reports an error of the query.
            KsqldbUnavailable: The response is not valid, or the connection broke.
        """
        try:
            lines: list[bytes] | None = self._rest
            while lines is not None:
                rows, error = _read(lines)
                if rows or lines is not self._rest:
                    yield rows
                if error:
                    raise error
                if self._closing:
                    return
                lines = await anext(self._lines, None)
        except HeadraceError:
            self.ended = True
            raise
        self.ended = True


class KsqldbServer:
    """Runs statements on a ksqlDB server; for use on one loop."""

    def __init__(self, settings: KsqldbConfig, clock: Clock) -> None:
        """Prepare; connections are opened when needed, so the server may be down.

        Raises:
            ConfigError: A file of TLS is not usable.
        """
        self._settings = settings
        self.tls = ClientTlsFiles("ksqldb.tls", settings.tls, clock) if settings.secure else None
        """Reads the files again when they change, if it is started."""
        self._url = settings.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close every connection."""
        if self._session:
            await self._session.close()
            self._session = None

    async def check(self) -> None:
        """Send a cheap request; KsqldbUnavailable if the server does not answer it."""
        async with self._response("GET", "/info") as response:
            await self._first_bytes(response)

    @contextlib.asynccontextmanager
    async def query(
        self, sql: str, properties: Mapping[str, Any], variables: Mapping[str, Any] | None = None
    ) -> AsyncIterator[ServerRows]:
        """Run a statement. A query that has not ended is closed on the server at the end of the context.

        Args:
            sql: One SELECT statement in ksqlDB's dialect.
            properties: Properties of the query: `auto.offset.reset`.
            variables: Values for `${name}` in the statement.

        Raises:
            StatementRejected: The server refuses the statement.
            KsqldbUnavailable: It does not answer in time, or not as a ksqlDB server.
        """
        text = sql if sql.rstrip().endswith(";") else f"{sql}\n;"
        body: dict[str, Any] = {"sql": text, "properties": dict(properties)}
        if variables:
            body["sessionVariables"] = dict(variables)
        async with self._response("POST", "/query-stream", body) as response:
            _keep_alive(response)
            batches = self._lines(response)
            rows = await self._begun(batches)
            try:
                yield rows
            finally:
                if rows.query_id and not rows.ended:
                    await self._close_query(rows.query_id)
                await batches.aclose()

    async def _begun(self, batches: AsyncIterator[list[bytes]]) -> ServerRows:
        """Wait for the header."""
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                async for lines in batches:
                    present = [line for line in lines if line]
                    if present:
                        return ServerRows(batches, _decode_header(present[0]), present[1:])
        except TimeoutError as cause:
            raise self._too_late() from cause
        except (msgspec.MsgspecError, ValueError) as cause:
            raise self._unavailable("its response has no header of a query", self._url_advice) from cause
        raise self._unavailable("its response is empty", self._url_advice)

    async def _lines(self, response: aiohttp.ClientResponse) -> Any:
        """Yield the lines of a response, those of each piece that arrives together; none after a second of silence."""
        pending = bytearray()
        try:
            while True:
                try:
                    async with asyncio.timeout(BLANK_SECONDS):
                        piece = await response.content.readany()
                except TimeoutError:
                    yield []
                    continue
                if not piece:
                    break
                pending += piece
                *lines, last = pending.split(b"\n") if b"\n" in piece else (pending,)
                if max(map(len, (*lines, last))) > MAX_LINE_BYTES:
                    raise self._unavailable(
                        f"a line of its response is longer than {MAX_LINE_BYTES} bytes", "Select less"
                    )
                if lines:
                    pending = last
                    yield [bytes(line).strip() for line in lines]
        except (aiohttp.ClientError, OSError) as cause:
            raise self._unavailable(f"the connection broke: {cause}", "Send the statement again") from cause
        if pending:
            yield [bytes(pending).strip()]

    @contextlib.asynccontextmanager
    async def _response(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; give its response if it is successful."""
        headers = {**self._settings.login(), "Accept": f"{DELIMITED}, application/json"}
        sent: dict[str, Any] = {"headers": headers, "allow_redirects": False}
        if body is not None:
            sent |= {"data": msgspec.json.encode(body)}
            headers["Content-Type"] = KSQL_JSON
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                response = await self._open_session().request(method, self._url + path, **sent)
        except TimeoutError as cause:
            raise self._too_late() from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise self._unavailable(self._settings.problem(cause), "Start it, or correct ksqldb.url") from cause
        try:
            if response.status != 200:
                raise self._refused(response.status, await self._first_bytes(response))
            yield response
        finally:
            response.close()

    async def _first_bytes(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > _MAX_ERROR_BYTES:
                        break
        except TimeoutError as cause:
            raise self._too_late() from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise self._unavailable(self._settings.problem(cause), "Send the statement again") from cause
        return bytes(content[:_MAX_ERROR_BYTES])

    async def _close_query(self, query_id: str) -> None:
        try:
            async with self._response("POST", "/close-query", {"queryId": query_id}):
                pass
        except HeadraceError as error:  # the server ends the query with its connection too
            log.debug("closing the ksqlDB query %s failed: %s", query_id, error.description)

    def _refused(self, status: int, body: bytes) -> HeadraceError:
        """Return the error for a response that is not successful."""
        try:
            problem = _decode_problem(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            problem = _Problem()
        message = problem.message[:1000] or f"HTTP {status}"
        if status in (401, 403):
            advice = self._settings.login_advice(status, "to run queries")
            return self._unavailable(f"it refuses the login (HTTP {status})", advice)
        if problem.error_code == _HTTP2_ONLY or "HTTP2" in problem.message:
            return self._unavailable("this version answers /query-stream over HTTP/2 only", "Update it")
        if status == 400 and problem.message:
            return StatementRejected(f"ksqlDB refused the statement: {message}")
        return self._unavailable(f"it answered {message}", self._url_advice if status < 500 else "Send it again later")

    @property
    def _url_advice(self) -> str:
        return "Correct ksqldb.url: it must be a ksqlDB server's"

    def _too_late(self) -> KsqldbUnavailable:
        seconds = self._settings.timeout_seconds
        return self._unavailable(f"no response within {seconds:g} s", "Is it overloaded?")

    def _unavailable(self, why: str, advice: str) -> KsqldbUnavailable:
        text = f"the ksqlDB server at {self._url} is not available: {why}. {advice}"
        return KsqldbUnavailable(text, url=self._url)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(ssl=self.tls.context if self.tls else True, limit=0),
            )
        return self._session


def _read(lines: list[bytes]) -> tuple[list[bytes], HeadraceError | None]:
    """Return the rows of lines, up to one that is an error, and the error."""
    rows: list[bytes] = []
    for line in lines:
        if line.startswith(b"[") and line.endswith(b"]"):
            rows.append(line)
        elif line and (error := _error_in(line)):
            return rows, error
    return rows, None


def _error_in(line: bytes) -> HeadraceError | None:
    """Return the error that a line is; None if it can be ignored."""
    try:
        message = _decode_problem(line).message[:1000]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return KsqldbUnavailable(
            "a line of ksqlDB's response is not a row: the connection broke, or the server is of another kind"
        )
    return StatementRejected(f"ksqlDB ended the query: {message}") if message else None


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    transport = response.connection and response.connection.transport
    if transport and (peer := transport.get_extra_info("socket")):
        for level, option, value in _KEEP_ALIVE:
            peer.setsockopt(level, option, value)
