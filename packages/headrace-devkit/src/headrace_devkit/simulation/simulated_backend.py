"""A backend of push on a machine: it parses requests, asks the scenario what to do, and reports what arrived and ended.

Each record of a request is an event `arrived`; `taken`, `refused` or `unanswered` follows for all of them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.network import Network, Transport
from headrace_devkit.simulation.world import Machine

PORT = 8000


class Arrived(NamedTuple):
    """A record as the backend got it."""

    topic: str
    partition: int
    offset: int
    attempt: int
    value: Any
    """Its JSON value, by which the scenario knows the record."""


class BackendAction(NamedTuple):
    """What the backend does with a request."""

    seconds: float
    """How long it works."""
    failed: frozenset[int] = frozenset()
    """Indices of the records that it refuses."""
    status: int = 200
    """Of the whole response; another one than 200 takes no record."""
    ends: str = "responds"
    """`responds`; `closes` the connection or `hangs`, with all of its work done."""


class SimulatedBackend:
    """A server on a machine of the network."""

    def __init__(
        self, network: Network, name: str, decide: Callable[[Machine, Sequence[Arrived]], BackendAction]
    ) -> None:
        """Listen; `decide` is called with the process and the records of each request."""
        self.machine = network.world.machine(name)
        network.join(self.machine)
        self.url = f"http://{name}:{PORT}/records"
        self._world = network.world
        self._decide = decide
        network.listen(self.machine, PORT, lambda transport: transport.set_protocol(_BackendRequests(self)))

    def request(self, transport: Transport, headers: dict[str, str], body: bytes) -> None:
        """Serve one request."""
        process = transport.peer.machine
        assert process
        if not body:
            self._respond(transport, 200, b"")  # whether the backend is there at all
            return
        records = _parsed(headers, body)
        world, name = self._world, process.name
        for one in records:
            world.note("arrived", name, one.topic, one.partition, one.offset, one.attempt)
        response = self._decide(process, records)
        world.call_later(response.seconds, lambda: self._end(transport, name, records, response), self.machine)

    def _end(self, transport: Transport, name: str, records: Sequence[Arrived], response: BackendAction) -> None:
        does_all = response.status == 200
        for index, one in enumerate(records):
            took = does_all and index not in response.failed
            how = "unanswered" if response.ends != "responds" else "taken" if took else "refused"
            self._world.note(how, name, one.topic, one.partition, one.offset, response.status)
        if response.ends == "closes":
            transport.abort()
        elif response.ends == "responds":
            results = [{"processed": index not in response.failed} for index in range(len(records))]
            self._respond(transport, response.status, json.dumps(results).encode() if does_all else b"no")

    def _respond(self, transport: Transport, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write(head.encode() + body)


class _BackendRequests:
    """The requests of one connection, one after the other."""

    def __init__(self, backend: SimulatedBackend) -> None:
        self._backend = backend
        self._bytes = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        while (end := self._bytes.find(b"\r\n\r\n")) >= 0:
            lines = self._bytes[:end].decode().split("\r\n")[1:]
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            size = int(headers.get("content-length", 0))
            if len(self._bytes) < end + 4 + size:
                return
            body, self._bytes = self._bytes[end + 4 : end + 4 + size], self._bytes[end + 4 + size :]
            self._backend.request(self._transport, headers, body)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        """The client is gone; work that has begun is done nevertheless."""


def _parsed(headers: dict[str, str], body: bytes) -> list[Arrived]:
    found = json.loads(body)
    if "x-headrace-offset" in headers:
        number = {name: int(headers[f"x-headrace-{name}"]) for name in ("partition", "offset", "attempt")}
        return [Arrived(headers["x-headrace-topic"], **number, value=found)]
    return [Arrived(*(one.get(name) for name in ("topic", "partition", "offset", "attempt", "value"))) for one in found]
