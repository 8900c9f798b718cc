"""Forwards requests for an active instance to the process that has it, and serves those that others forward.

A forwarded request has a header that is signed with `cluster.secret`. It names the process that must serve it, so it
is never forwarded again, and the principal that this process has authenticated. So it works in every mode of
`security`, credentials are sent no second time, and limits count once.

A forwarded read has a chunked request body: the number of bytes that were written to the client until now, and once
the response is whole, of those that the client has received. The process that has the instance counts records as
delivered when that number is what it has sent. If the client or the forwarding process disappears before, the
connection ends without it, and the records return to the instance.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import ssl
from collections import defaultdict
from typing import Final, Protocol

import msgspec

from headrace.config.http import HttpConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.errors import Draining, HopRefused, InstanceGone, InstanceNotFound, OwnerUnavailable
from headrace.http.asgi import (
    STREAMING,
    UNREAD_SECONDS,
    WRITTEN,
    AsgiApp,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    client_closed,
    headers_of,
)
from headrace.http.auth import Principal
from headrace.http.endpoint import PRINCIPAL, Endpoint, owner_of, principal_of
from headrace.http.messages import read_body
from headrace.http.peer_connection import PeerConnection
from headrace.records import InstanceOwner
from headrace.runtime import Clock, run_while
from headrace.runtime.supervisor import first_of
from headrace.runtime.telemetry.correlation import caller, correlation_id

_HOP: Final = "headrace.hop"
_HEADER: Final = b"x-headrace-hop"
_FRESH_SECONDS: Final = 30.0
"""How old a signature may be; clocks of the processes may differ by as much."""
_CONFIRM_SECONDS: Final = 30.0
"""Longest time without word of a client that must get what was sent."""
_UNREAD_END_SECONDS: Final = 10.0
"""Longest time in which a client acknowledges nothing of the end of its response."""
_CONFIRMED_SOON_SECONDS: Final = 2.0
_MOST_KEPT: Final = 32
"""Unused connections to one process."""
_REQUEST_HEADERS: Final = b"accept content-type idempotency-key last-event-id x-traceability-id traceparent".split()
_RESPONSE_HEADERS: Final = b"""
    content-type content-length cache-control idempotency-replayed x-accel-buffering retry-after
    """.split()


class _Hop(msgspec.Struct, frozen=True):
    """What one process says to another about a request."""

    to: str
    """Id of the process that must serve it."""
    at: float
    """Seconds since the epoch."""
    principal: Principal | None


_decode_hop = msgspec.msgpack.Decoder(_Hop).decode


class Owners(Protocol):
    """Which process has which instance."""

    @property
    def process(self) -> str:
        """Id of this process."""

    async def find(self, group: str, name: str) -> InstanceOwner | None:
        """Return the process that has an instance or had it last; None if there is no such instance."""

    def suspect(self) -> None:
        """Have it looked at soon whether the other processes still run."""


class Forwarder:
    """Decides for each request of an instance where it is served."""

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
        self._unconfirmed: dict[tuple[str, str], asyncio.Event] = {}
        """Set when the response of a forwarded read is confirmed or not needed any more, by group and instance."""

    def is_forwarded(self, scope: Scope) -> bool:
        """Return whether another process forwarded a request; its principal is put into the scope.

        Raises:
            HopRefused: The signature is not valid.
        """
        given = headers_of(scope).get(_HEADER)
        if given is None:
            return False
        payload, _, signature = given.partition(b".")
        if not hmac.compare_digest(signature, self._sign(scope, payload)):
            raise HopRefused("X-Headrace-Hop is not signed with cluster.secret of this process: clients omit it")
        hop = scope[_HOP] = _decode_hop(base64.urlsafe_b64decode(payload))
        if not abs(hop.at - self._clock.time()) <= _FRESH_SECONDS:  # nor NaN
            raise HopRefused(f"X-Headrace-Hop differs by more than {_FRESH_SECONDS:g} s from this clock: correct it")
        if hop.principal:
            scope[PRINCIPAL] = hop.principal
            caller.set(hop.principal.name)
        return True

    async def serve(
        self,
        app: AsgiApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        key: tuple[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        """Serve a request of an instance, of `key` or that in the path, here or in the process that has it.

        Raises:
            InstanceGone: The process that had it has ended.
            InstanceNotFound: It belongs to another principal.
            OwnerUnavailable: The process that has it does not answer now.
        """
        hop: _Hop | None = scope.get(_HOP)
        group, name = key = key or (scope["path_params"]["group"], scope["path_params"]["instance"])
        owner = None if hop else await self._owners.find(group, name)
        if owner and owner.process != self._owners.process:
            if owner.principal != owner_of(scope):
                raise InstanceNotFound(f"group {group[:100]} has no instance {name[:100]}: create it, and subscribe it")
            if owner.gone_at is not None:
                raise self._gone(group, name)
            await self._forward(owner, scope, receive, send, body)
            return
        if hop and hop.to != self._owners.process:
            raise self._gone(group, name)
        if unconfirmed := self._unconfirmed.get(key):  # the client has the records, and the process learns it soon
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(unconfirmed.wait(), _CONFIRMED_SOON_SECONDS)
        if hop and _is_read(scope):
            await self._serve_read(key, app, scope, receive, send)
        else:
            await app(scope, receive, send)

    async def _serve_read(self, key: tuple[str, str], app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a read that another process forwards; records are delivered when that process confirms it."""
        sent = confirmed = 0
        moved = asyncio.Event()

        async def count(message: Message) -> None:
            nonlocal sent
            sent += len(message.get("body", b""))
            await send(message)

        async def follow() -> None:
            nonlocal confirmed
            text = b""
            while (message := await receive())["type"] == "http.request":
                *lines, text = (text + message["body"]).split(b"\n")
                if lines:
                    confirmed = int(lines[-1])
                    moved.set()

        async def never() -> Message:
            await asyncio.Event().wait()
            raise ClientGone

        async def written(limit_seconds: float = _CONFIRM_SECONDS) -> bool:
            settled = self._unconfirmed[key] = asyncio.Event()
            try:
                async with asyncio.timeout(limit_seconds) as limit:
                    while confirmed < sent:
                        moved.clear()
                        await moved.wait()
                        limit.reschedule(asyncio.get_running_loop().time() + limit_seconds)
            except TimeoutError:
                return False
            finally:
                self._unconfirmed.pop(key, None)
                settled.set()
            return True

        scope["state"][STREAMING] = True  # the request's body is long and slow
        scope["state"][WRITTEN] = lambda: written

        async def serving() -> None:
            await app(scope, never, count)

        await run_while(serving(), follow())

    async def _forward(
        self, owner: InstanceOwner, scope: Scope, receive: Receive, send: Send, body: bytes | None
    ) -> None:
        if owner.url not in self._settings.peers:
            raise OwnerUnavailable(
                f"the instance is in the process {owner.url}, which cluster.peers does not name here"
            )
        if self._in_flight[owner.url] >= self._settings.max_forwarded:
            limit = self._settings.max_forwarded
            raise OwnerUnavailable(f"{limit} requests are forwarded to {owner.url} now")
        reads = _is_read(scope)
        if body is None:
            body = b"" if reads else await read_body(receive, headers_of(scope), self._http)
        request = self._head(owner, scope, None if reads else len(body)) + body
        self._in_flight[owner.url] += 1
        answered = asyncio.Event()

        async def client_left() -> None:
            await client_closed(receive)
            if answered.is_set():  # how it has closed the connection tells whether it has the response
                await asyncio.Event().wait()

        try:
            answering = self._answer(owner.url, request, scope, send, answered)
            if not reads:
                await answering
            elif await run_while(answering, first_of(client_left(), self.ending.wait())) is None:
                if answered.is_set():
                    return
                if not self.ending.is_set():
                    raise ClientGone
                if STREAMING not in scope["state"]:
                    raise Draining
                await send({"type": "http.response.body", "body": b""})
        except OSError as cause:
            if answered.is_set():  # the records are read again
                return
            self._owners.suspect()
            why = str(cause) or "no response in time"
            raise OwnerUnavailable(f"the process {owner.url} has the instance and does not answer: {why}") from cause
        finally:
            self._in_flight[owner.url] -= 1

    async def _answer(self, url: str, request: bytes, scope: Scope, send: Send, answered: asyncio.Event) -> bool:
        """Answer a request with what another process answers; `answered` is set when the response is whole."""
        connection = await self._ask(url, request)
        try:
            if connection.status == HopRefused.status and HopRefused.code.encode() in await connection.next_part():
                raise OwnerUnavailable(f"the process {url} refuses this one: cluster.secret or the clocks differ")
            headers = [(name, value) for name, value in connection.headers if name in _RESPONSE_HEADERS]
            await send({"type": "http.response.start", "status": connection.status, "headers": headers})
            streams = (b"transfer-encoding", b"chunked") in connection.headers
            if streams:
                scope["state"][STREAMING] = True
            reads, written, arrival = _is_read(scope), scope["state"].get(WRITTEN), None
            count = confirmed = 0
            while part := await connection.next_part():
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if reads:
                    if written is not None and not (arrival := await written()(UNREAD_SECONDS)):
                        raise ClientGone
                    count += len(part)
                    confirmed = confirmed if connection.has_ended else count
                    connection.send_chunk(b"%d\n" % confirmed)
            if streams:
                arrival = None
            if arrival:
                arrival.await_close()
            answered.set()
            await send({"type": "http.response.body", "body": b""})
            if reads:
                reading = functools.partial(connection.send_chunk, b"%d\n" % confirmed)
                if arrival and not await arrival.received(_UNREAD_END_SECONDS, reading):
                    raise ClientGone
                connection.send_chunk(b"%d\n" % count)
                connection.send_chunk(b"")
        except BaseException:
            connection.close()
            raise
        if len(self._kept[url]) < _MOST_KEPT:
            self._kept[url].append(connection)
        else:
            connection.close()
        return True

    async def _ask(self, url: str, request: bytes) -> PeerConnection:
        """Send a request on a kept connection, or on a new one if that was closed meanwhile."""
        while True:
            kept = self._kept[url].pop() if self._kept[url] else None
            connection = kept or await PeerConnection.open(url, self._tls)
            try:
                await connection.ask(request)
                return connection
            except ConnectionError:
                if not kept:
                    raise
            finally:
                if not connection.status:
                    connection.close()

    def _head(self, owner: InstanceOwner, scope: Scope, length: int | None) -> bytes:
        """Return the head of a forwarded request; without a length its body is chunked."""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        hop = _Hop(owner.process, self._clock.time(), principal_of(scope))
        payload = base64.urlsafe_b64encode(msgspec.msgpack.encode(hop))
        headers = [
            (b"Host", owner.url.partition("://")[2].encode()),
            (_HEADER, payload + b"." + self._sign(scope, payload)),
            (b"X-Correlation-Id", correlation_id.get().encode()),
            (b"Transfer-Encoding", b"chunked") if length is None else (b"Content-Length", b"%d" % length),
            *((name, value) for name, value in headers_of(scope).items() if name in _REQUEST_HEADERS),
        ]
        lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", *(b"%s: %s" % one for one in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _sign(self, scope: Scope, payload: bytes) -> bytes:
        signed = b"\n".join((scope["method"].encode(), scope["raw_path"], scope["query_string"], payload))
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest().encode()

    def _gone(self, group: str, name: str) -> InstanceGone:
        return InstanceGone(
            f"instance {name[:100]} of group {group[:100]} is gone, because its process has ended; "
            "what the group committed is intact: create an instance, and subscribe it, again"
        )


def _is_read(scope: Scope) -> bool:
    """Return whether a request reads records, so that its response moves positions."""
    endpoint: Endpoint = scope["endpoint"]
    return endpoint.method == "GET" and endpoint.changes
