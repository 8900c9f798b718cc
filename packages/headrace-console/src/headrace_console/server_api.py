"""Requests to the HTTP API of Headrace: the process of a deployment that gets them, and what an error says."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx

from headrace.client import AsyncHeadraceClient
from headrace.client.exchange import ClientRequest, HttpReply, send_once
from headrace.errors import HeadraceError
from headrace_console.sessions import Session

REQUEST_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 2.0
_MOST_CONNECTIONS: Final = 100
UNREACHABLE_STATUS: Final = 502
_NOT_HERE: Final = ("ERR10007", "ERR10008")
"""Codes of a path or method that this listener does not have."""
_ADMINISTRATION: Final = ("/adm/", "/metrics")
_BUSY: Final = "Headrace is slow, and too many requests of the console wait for it: try again in some seconds"
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class ApiProblem(Exception):
    """A request has failed; the text is a sentence for people, which says what to do."""

    def __init__(self, sentence: str, status: int, code: str = "") -> None:
        """Keep the sentence; `status` is 502 if no process responds."""
        super().__init__(sentence)
        self.status = status
        self.code = code


class ApiReply(NamedTuple):
    """A response: its JSON, its status, and the id that log and audit have of it."""

    body: Any
    status: int
    correlation_id: str


class Servers:
    """The processes of one deployment. If one does not respond, the next gets the request."""

    def __init__(self, urls: Sequence[str], management: str = "", trusted: ssl.SSLContext | None = None) -> None:
        """Prepare without connecting.

        Args:
            urls: Base URLs of the processes.
            management: That of a listener for administration, if there is one.
            trusted: Whose certificates they may have; by default those of the system's authorities.
        """
        options: dict[str, Any] = {"limits": httpx.Limits(max_connections=_MOST_CONNECTIONS), "verify": trusted or True}
        self._urls = [url.rstrip("/") for url in urls]
        self._clients = [AsyncHeadraceClient(url, **options) for url in urls]
        self._management = AsyncHeadraceClient(management, **options) if management else None
        self._present = 0
        self.outage_since: float | None = None
        """Since when no process responds, in seconds since the epoch."""
        self.outage_reason = ""

    @property
    def url(self) -> str:
        """The process that gets the next request."""
        return self._urls[self._present]

    async def send(
        self,
        session: Session,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        expected: Sequence[int] = (),
        *,
        seconds: float = REQUEST_SECONDS,
    ) -> ApiReply:
        """Send a request and return the response; an error with an expected status is a response, too.

        `seconds` limits how long each process may take.

        Raises:
            ApiProblem: No process responds, too many requests wait, or the request was refused.
        """
        headers = {"Authorization": f"Bearer {session.token}"} if session.token else {}
        path += f"?{httpx.QueryParams(query)}" if query else ""
        request = ClientRequest(method, path, body, headers, response_seconds=seconds, connect_seconds=_CONNECT_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await session.turns.acquire()
        except TimeoutError:
            raise ApiProblem(_BUSY, 503) from None
        try:
            reply = await self._reply(request, expected)
        except HeadraceError as refused:
            self.outage_since, self.outage_reason = None, ""
            raise ApiProblem(refused.description, refused.status, refused.code) from refused
        finally:
            session.turns.release()
        try:
            found = json.loads(reply.body) if reply.body else {}
            found = _without_surrogates(found) if _SURROGATE.search(reply.body) else found
        except (ValueError, RecursionError):
            found = reply.body.decode(errors="replace")
        return ApiReply(found, reply.status, reply.headers.get("x-correlation-id", ""))

    async def needs_token(self, seconds: float = REQUEST_SECONDS) -> bool:
        """Return whether requests without a token are refused; false while no process responds in time."""
        try:
            path = "/adm/server/info"
            reply = await self.send(Session(""), "GET", path, expected=(401, 403), seconds=seconds)
            return reply.status == 401
        except ApiProblem:
            return False

    async def close(self) -> None:
        """Close all connections."""
        for client in filter(None, [*self._clients, self._management]):
            await client.aclose()

    async def _reply(self, request: ClientRequest, expected: Sequence[int]) -> HttpReply:
        reasons = []
        first = self._present  # another request may turn to the next process meanwhile
        for turn in range(len(self._clients)):
            at = (first + turn) % len(self._clients)
            administers = self._management and request.path.startswith(_ADMINISTRATION)
            client = self._management if self._management and administers else self._clients[at]
            try:
                try:
                    reply = await client.run(send_once(request, expected))
                except HeadraceError as refused:
                    if administers or not self._management or refused.code not in _NOT_HERE:
                        raise
                    reply = await self._management.run(send_once(request, expected))
            except httpx.PoolTimeout:
                raise ApiProblem(_BUSY, 503) from None
            except httpx.RequestError as cause:
                reasons.append(f"{client.http.base_url}: {str(cause) or type(cause).__name__}")
                if self._present == at:
                    self._present = (at + 1) % len(self._clients)
                if request.method != "GET" and not isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
                    raise ApiProblem(
                        f"the response was lost ({cause}): look whether it was done before you do it again",
                        UNREACHABLE_STATUS,
                    ) from cause
                continue
            self.outage_since, self.outage_reason = None, ""
            return reply
        self.outage_since = self.outage_since or time.time()
        self.outage_reason = "; ".join(reasons)
        is_untrusted = "CERTIFICATE_VERIFY_FAILED" in self.outage_reason
        remedy = "its certificate is not trusted, start the console with --ca FILE" if is_untrusted else "start it"
        raise ApiProblem(f"Headrace is unreachable ({self.outage_reason}): {remedy}", UNREACHABLE_STATUS)


def _without_surrogates(found: Any) -> Any:
    """Return JSON whose texts are Unicode: half of a surrogate pair, which JSON allows, cannot be sent to a browser."""
    if isinstance(found, str):
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(found, dict):
        return {_without_surrogates(name): _without_surrogates(value) for name, value in found.items()}
    return [*map(_without_surrogates, found)] if isinstance(found, list) else found
