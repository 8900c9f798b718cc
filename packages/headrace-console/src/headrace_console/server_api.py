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
        settings: dict[str, Any] = {
            "limits": httpx.Limits(max_connections=_MOST_CONNECTIONS),
            "timeout": httpx.Timeout(REQUEST_SECONDS, connect=_CONNECT_SECONDS),
            "verify": trusted or True,
        }
        self._clients = [httpx.AsyncClient(base_url=url, **settings) for url in urls]
        self._management = httpx.AsyncClient(base_url=management, **settings) if management else None
        self._present = 0
        self.outage_since: float | None = None
        """Since when no process responds, in seconds since the epoch."""
        self.outage_reason = ""

    @property
    def url(self) -> str:
        """The process that gets the next request."""
        return str(self._clients[self._present].base_url).rstrip("/")

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
        request = {"json": body, "params": query or None, "headers": headers}
        request["timeout"] = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        if body is None:
            del request["json"]
        try:
            async with asyncio.timeout(seconds):
                await session.turns.acquire()
        except TimeoutError:
            raise ApiProblem(_BUSY, 503) from None
        try:
            response = await self._response(method, path, request)
        finally:
            session.turns.release()
        if response.status_code >= 400 and response.status_code not in expected:
            raise _problem_of(response)
        try:
            found = json.loads(response.content) if response.content else {}
            found = _without_surrogates(found) if _SURROGATE.search(response.content) else found
        except ValueError:
            found = response.text
        return ApiReply(found, response.status_code, response.headers.get("x-correlation-id", ""))

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

    async def _response(self, method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        reasons = []
        first = self._present  # another request may turn to the next process meanwhile
        for turn in range(len(self._clients)):
            at = (first + turn) % len(self._clients)
            client = self._clients[at]
            if self._management and path.startswith(_ADMINISTRATION):
                client = self._management
            try:
                response = await client.request(method, path, **request)
                if self._management and client is not self._management and _lacks_path(response):
                    response = await self._management.request(method, path, **request)
            except httpx.PoolTimeout:
                raise ApiProblem(_BUSY, 503) from None
            except httpx.RequestError as cause:
                reasons.append(f"{client.base_url}: {str(cause) or type(cause).__name__}")
                if self._present == at:
                    self._present = (at + 1) % len(self._clients)
                if method != "GET" and not isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
                    raise ApiProblem(
                        f"the response was lost ({cause}): look whether it was done before you do it again",
                        UNREACHABLE_STATUS,
                    ) from cause
                continue
            self.outage_since, self.outage_reason = None, ""
            return response
        self.outage_since = self.outage_since or time.time()
        self.outage_reason = "; ".join(reasons)
        is_untrusted = "CERTIFICATE_VERIFY_FAILED" in self.outage_reason
        remedy = "its certificate is not trusted, start the console with --ca FILE" if is_untrusted else "start it"
        raise ApiProblem(f"Headrace is unreachable ({self.outage_reason}): {remedy}", UNREACHABLE_STATUS)


def _lacks_path(response: httpx.Response) -> bool:
    """Return whether this listener does not have the path; that for administration may have it."""
    return response.status_code in (404, 405) and _problem_of(response).code in _NOT_HERE


def _without_surrogates(found: Any) -> Any:
    """Return JSON whose texts are Unicode: half of a surrogate pair, which JSON allows, cannot be sent to a browser."""
    if isinstance(found, str):
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(found, dict):
        return {_without_surrogates(name): _without_surrogates(value) for name, value in found.items()}
    return [*map(_without_surrogates, found)] if isinstance(found, list) else found


def _problem_of(response: httpx.Response) -> ApiProblem:
    try:
        body = response.json()
        return ApiProblem(str(body["description"]), response.status_code, str(body.get("code", "")))
    except (ValueError, LookupError, TypeError, AttributeError):
        sentence = (
            f"{response.url.host} answers {response.status_code} without an error of Headrace: it is another server"
        )
        return ApiProblem(sentence, response.status_code)
