"""Forwards requests for what only one process has to that process, and serves those that others forward.

A forwarded request has a header that is signed with `cluster.secret`. It names the process that must serve it, so the
request is never forwarded twice. It also names the principal that the first process has authenticated. So forwarding
works in every mode of `security`, credentials are sent only once, and limits count once.

The request body of a forwarded read is chunked. It reports the number of bytes written to the client so far and, once
the response is complete, the number that the client has received. The process that serves it counts the records as
delivered when that number equals what it has sent. If the client or the forwarding process disappears earlier, the
connection ends without it, and the records will be read again.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import ssl
from collections import defaultdict
from typing import Any, Final, Protocol

import msgspec

from headrace.config.http import HttpConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.errors import Draining, ForwardRefused, HeadraceError, KafkaTimeout, OwnerUnavailable
from headrace.http.auth import Principal
from headrace.http.auth.principals import RequestCaller
from headrace.http.endpoint import Endpoint, Serve, owner_of
from headrace.http.messages import read_body
from headrace.http.peer_connection import PeerConnection, PeerResponseLost
from headrace.http.request import UNREAD_SECONDS, ClientGone, HttpRequest
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.records import OwningProcess
from headrace.runtime import Clock, run_while
from headrace.runtime.supervisor import first_of
from headrace.runtime.telemetry.correlation import caller, correlation_id
from headrace.runtime.telemetry.tracing import current_span

Key = tuple[str, ...]
"""Names what only one process has: the values of the path parameters of `Endpoint.affinity`."""
_HEADER: Final = b"x-headrace-forwarded"
_RECORD: Final = b"x-headrace-"
"""Beginning of the headers that describe a record."""
_FRESH_SECONDS: Final = 30.0
"""Maximum age of a signature, and so the maximum difference between the clocks of two processes."""
_CONFIRM_SECONDS: Final = 30.0
"""Longest time without progress in confirming that a client has received its response."""
_UNREAD_END_SECONDS: Final = 10.0
"""Longest time without progress while a client acknowledges the end of its response."""
_CONFIRMED_SOON_SECONDS: Final = 2.0
_MOST_KEPT: Final = 32
"""Unused connections to one process."""
_REQUEST_HEADERS: Final = b"accept content-type idempotency-key last-event-id x-traceability-id traceparent".split()
_RESPONSE_HEADERS: Final = b"""
    content-type content-length cache-control idempotency-replayed x-accel-buffering retry-after
    """.split()


class _Forwarded(msgspec.Struct, frozen=True):
    """The signed content of the header of a forwarded request."""

    to: str
    """Id of the process that must serve it."""
    at: float
    """When it was signed, in seconds since the epoch."""
    principal: Principal | None


_decode_forwarded = msgspec.msgpack.Decoder(_Forwarded).decode


class Owners(Protocol):
    """Which process has what, by a key."""

    @property
    def what(self) -> str:
        """What it is called in errors."""

    @property
    def process(self) -> str:
        """Id of this process."""

    async def find(self, key: Key) -> OwningProcess | None:
        """Return the last known owner; None if there is none."""

    def missing(self, key: Key) -> HeadraceError:
        """Return the error for a key without an owner, or of another principal."""

    def gone(self, key: Key) -> HeadraceError:
        """Return the error for a key whose process has ended."""

    def suspect(self) -> None:
        """Check soon whether the other processes still run."""


class Forwarder:
    """Decides for each request that only one process can serve where it is served."""

    def __init__(
        self, cluster: ClusterConfig, http: HttpConfig, owners: Owners, tls: ssl.SSLContext | None, clock: Clock
    ) -> None:
        self._owners = owners
        self.ending = asyncio.Event()
        """Set when this process stops: forwarded reads end."""
        self._settings = cluster
        self._http = http
        self._tls = tls
        self._clock = clock
        self._secret = cluster.secret.get_secret_value().encode()
        self._kept: defaultdict[str, list[PeerConnection]] = defaultdict(list)
        self._in_flight: defaultdict[str, int] = defaultdict(int)
        self._unconfirmed: dict[Key, asyncio.Event] = {}
        """By key: set when the response of a forwarded read is confirmed, or no longer needed."""

    def is_forwarded(self, request: HttpRequest) -> bool:
        """Return whether another process forwarded a request; if so, that process has identified the caller.

        Raises:
            ForwardRefused: The signature is not valid.
        """
        given = request.head.headers.get(_HEADER)
        if given is None:
            return False
        payload, _, signature = given.partition(b".")
        if not hmac.compare_digest(signature, self._sign(request, payload)):
            raise ForwardRefused("X-Headrace-Forwarded has an invalid signature; clients must not send this header")
        forwarded = _decode_forwarded(base64.urlsafe_b64decode(payload))
        if not abs(forwarded.at - self._clock.time()) <= _FRESH_SECONDS:  # also rejects NaN
            raise ForwardRefused(
                f"the clocks of the two processes differ by more than {_FRESH_SECONDS:g} s; synchronise them"
            )
        request.caller = RequestCaller(forwarded.principal, forwarded=forwarded)
        if forwarded.principal:
            caller.set(forwarded.principal.name)
        return True

    async def serve(self, here: Serve, request: HttpRequest, key: Key | None = None, body: bytes | None = None) -> Any:
        """Serve a request by `here`, or in the process that has its key; by default, its path has the key.

        Returns:
            What `here` returns; None if another process has responded.

        Raises:
            HeadraceError: That process has ended, or the key belongs to another principal.
            OwnerUnavailable: Its process does not respond.
            KafkaTimeout: The request writes records; its process may have served it, and the response is lost.
        """
        forwarded: _Forwarded | None = request.caller.forwarded
        if key is None:
            endpoint: Endpoint = request.head.route.endpoint
            key = tuple(request.head.route.parameters[name] for name in endpoint.affinity)
        owner = None if forwarded else await self._owners.find(key)
        if owner and owner.process != self._owners.process:
            if owner.principal != owner_of(request):
                raise self._owners.missing(key)
            if owner.gone_at is not None:
                raise self._owners.gone(key)
            await self.forward(owner, self._owners.what, request, body)
            return None
        if forwarded and forwarded.to != self._owners.process:
            raise self._owners.gone(key)
        if unconfirmed := self._unconfirmed.get(key):  # the client has the records; the confirmation arrives soon
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(unconfirmed.wait(), _CONFIRMED_SOON_SECONDS)
        if forwarded and _is_read(request):
            return await self._serve_read(key, here, request)
        return await here(request)

    async def ask(self, url: str, request: HttpRequest, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request to another process as well; return status and body of its response.

        Raises:
            OSError: That process does not respond.
        """
        connection = await self._send(url, self._head(OwningProcess("", url, ""), request, len(body)) + body)
        try:
            parts = []
            while part := await connection.next_part():
                parts.append(part)
        except BaseException:
            connection.close()
            raise
        self._keep(url, connection)
        return connection.status, b"".join(parts)

    async def _serve_read(self, key: Key, here: Serve, request: HttpRequest) -> None:
        """Serve a read that another process forwarded; its records are delivered when that process confirms them."""
        confirmed = 0
        moved = asyncio.Event()

        async def follow() -> None:
            nonlocal confirmed
            text = b""
            with contextlib.suppress(ClientGone):
                while request.body.has_more or request.body.chunks:
                    *lines, text = (text + await request.body.receive()).split(b"\n")
                    if lines:
                        confirmed = int(lines[-1])
                        moved.set()
                await request.body.closed()

        async def confirm(patience_seconds: float | None) -> bool:
            limit_seconds = patience_seconds or _CONFIRM_SECONDS
            settled = self._unconfirmed[key] = asyncio.Event()
            try:
                async with asyncio.timeout(limit_seconds) as limit:
                    while confirmed < request.response.sent_bytes:
                        moved.clear()
                        await moved.wait()
                        limit.reschedule(asyncio.get_running_loop().time() + limit_seconds)
            except TimeoutError:
                return False
            finally:
                self._unconfirmed.pop(key, None)
                settled.set()
            return True

        request.is_streaming = True  # the request body grows slowly, with each confirmation
        request.response.confirm = confirm
        await run_while(here(request), follow())

    async def forward(self, owner: OwningProcess, what: str, request: HttpRequest, body: bytes | None) -> None:
        """Pass a request and its response on to the process that has `what`; with a body, one that writes records.

        Raises:
            OwnerUnavailable: That process does not respond.
            KafkaTimeout: It may have served the request, and its response is lost.
        """
        if owner.url not in self._settings.peers:
            raise OwnerUnavailable(f"the process {owner.url} has the {what}, and is missing in cluster.peers here")
        if self._in_flight[owner.url] >= self._settings.max_forwarded:
            limit = self._settings.max_forwarded
            raise OwnerUnavailable(f"already forwarding {limit} requests to {owner.url}, which is the limit")
        reads, writes = _is_read(request), body is not None
        if body is None:
            body = b"" if reads else await read_body(request, self._http)
        sent = self._head(owner, request, None if reads else len(body)) + body
        self._in_flight[owner.url] += 1
        answered = asyncio.Event()

        async def client_left() -> None:
            await request.body.closed()
            if answered.is_set():  # how it closed the connection shows whether it has the response
                await asyncio.Event().wait()

        try:
            answering = self._answer(owner.url, sent, request, answered)
            if not reads:
                await answering
            elif await run_while(answering, first_of(client_left(), self.ending.wait())) is None:
                if answered.is_set():
                    return
                if not self.ending.is_set():
                    raise ClientGone
                if not request.is_streaming:
                    raise Draining
                await request.response.end()
        except OSError as cause:
            if answered.is_set():  # the records will be read again
                return
            self._owners.suspect()
            why = str(cause) or "timed out"
            if writes and isinstance(cause, PeerResponseLost):
                text = f"the process {owner.url} has the {what}, and its response is lost: {why}"
                raise KafkaTimeout(text, retriable=IDEMPOTENCY_KEY in request.head.headers) from cause
            raise OwnerUnavailable(f"the process {owner.url} has the {what} and does not respond: {why}") from cause
        finally:
            self._in_flight[owner.url] -= 1

    async def _answer(self, url: str, sent: bytes, request: HttpRequest, answered: asyncio.Event) -> bool:
        """Pass on the response of another process; `answered` is set when the response is complete."""
        connection = await self._send(url, sent)
        try:
            if (
                connection.status == ForwardRefused.status
                and ForwardRefused.code.encode() in await connection.next_part()
            ):
                raise OwnerUnavailable(f"the process {url} rejects this one: cluster.secret or the clocks differ")
            headers = [(name, value) for name, value in connection.headers if name in _RESPONSE_HEADERS]
            await request.response.start(connection.status, headers)
            streams = (b"transfer-encoding", b"chunked") in connection.headers
            if streams:
                request.is_streaming = True
            reads = _is_read(request)
            arrival = None
            count = 0
            confirmed = 0
            while part := await connection.next_part():
                if not reads:
                    await request.response.write(part)
                    continue
                arrival = await request.response.write_through(part, UNREAD_SECONDS)
                if not arrival:
                    raise ClientGone
                count += len(part)
                if not connection.has_ended:
                    confirmed = count
                connection.send_chunk(b"%d\n" % confirmed)
            if streams:
                arrival = None
            if arrival:
                arrival.await_close()
            answered.set()
            await request.response.end()
            if reads:
                reading = functools.partial(connection.send_chunk, b"%d\n" % confirmed)
                if arrival and not await arrival.received(_UNREAD_END_SECONDS, reading):
                    raise ClientGone
                connection.send_chunk(b"%d\n" % count)
                connection.send_chunk(b"")
        except BaseException:
            connection.close()
            raise
        self._keep(url, connection)
        return True

    def _keep(self, url: str, connection: PeerConnection) -> None:
        if len(self._kept[url]) < _MOST_KEPT:
            self._kept[url].append(connection)
        else:
            connection.close()

    async def _send(self, url: str, request: bytes) -> PeerConnection:
        """Send a request on a kept connection, or on a new one if the kept one has been closed.

        Raises:
            PeerResponseLost: The other process may have got it.
            OSError: It has not.
        """
        lost: OSError | None = None
        while True:
            kept = self._kept[url].pop() if self._kept[url] else None
            try:
                connection = kept or await PeerConnection.open(url, self._tls)
            except OSError as cause:
                if not lost:
                    raise
                raise PeerResponseLost(str(lost)) from cause
            try:
                await connection.send(request)
                return connection
            except OSError as cause:
                lost = cause
                if not kept or not isinstance(cause, ConnectionError):
                    raise PeerResponseLost(str(cause)) from cause
            finally:
                if not connection.status:
                    connection.close()

    def _head(self, owner: OwningProcess, request: HttpRequest, length: int | None) -> bytes:
        """Return the head of a forwarded request; without a length its body is chunked."""
        target = request.head.target + (b"?" + request.head.query if request.head.query else b"")
        forwarded = _Forwarded(owner.process, self._clock.time(), request.caller.principal)
        payload = base64.urlsafe_b64encode(msgspec.msgpack.encode(forwarded))
        given = {name: value for name, value in request.head.headers.items() if name in _REQUEST_HEADERS}
        of_record = [pair for pair in request.head.fields if pair[0].startswith(_RECORD) and pair[0] != _HEADER]
        if span := current_span.get():
            given |= {name.encode(): value.encode() for name, value in span.headers()}
        headers = [
            (b"Host", owner.url.partition("://")[2].encode()),
            (_HEADER, payload + b"." + self._sign(request, payload)),
            (b"X-Correlation-Id", correlation_id.get().encode()),
            (b"Transfer-Encoding", b"chunked") if length is None else (b"Content-Length", b"%d" % length),
            *given.items(),
            *of_record,
        ]
        lines = [request.head.method.encode() + b" " + target + b" HTTP/1.1", *(b"%s: %s" % one for one in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _sign(self, request: HttpRequest, payload: bytes) -> bytes:
        signed = b"\n".join((request.head.method.encode(), request.head.target, request.head.query, payload))
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest().encode()


def _is_read(request: HttpRequest) -> bool:
    """Return whether a request reads records, so that its response moves positions."""
    endpoint: Endpoint = request.head.route.endpoint
    return endpoint.method == "GET" and endpoint.changes
