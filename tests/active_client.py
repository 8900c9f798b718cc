"""A client of active consumers, as a user writes one: requests, and connections that read as much as a test wants."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace.records import OutgoingRecord
from headrace_devkit.testing.scenario import Scenario

_LIMIT_SECONDS = 60.0


class Response(NamedTuple):
    """An HTTP response with parsed JSON."""

    status: int
    body: Any

    @property
    def code(self) -> str:
        return self.body["code"] if isinstance(self.body, dict) else ""

    @property
    def reason(self) -> str:
        """The slug of its error."""
        return self.body["metadata"]["reason"] if self.status >= 400 else ""


def send(
    method: str,
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Response:
    """Send a request."""
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(url, data, {**given, **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_SECONDS, context=context) as response:
            text = response.read()
            return Response(response.status, json.loads(text) if text else None)
    except urllib.error.HTTPError as response:
        with response:
            return Response(response.code, json.load(response))


class Instance:
    """An instance as a client sees it."""

    def __init__(self, url: str, group: str, **settings: Any) -> None:
        self.created = send("POST", f"{url}/consumers/{group}", {"autoOffsetReset": "earliest", **settings})
        assert self.created.status == 200, self.created
        self.url = url + self.created.body["base_uri"]

    def __call__(self, method: str, path: str = "", body: Any = None) -> Response:
        return send(method, self.url + path, body)

    def ok(self, method: str, path: str = "", body: Any = None) -> Any:
        """Send a request that succeeds, and return the body of its response."""
        response = self(method, path, body)
        assert response.status in (200, 204), response
        return response.body

    def read(self, count: int, query: str = "") -> list[Any]:
        """Read until there are this many records, with one empty read after the last."""
        found: list[Any] = []
        for _ in range(100):
            last = 0 < count <= len(found)
            response = self.ok("GET", f"/records?timeout={300 if last else 2000}{query}")
            found += response
            if len(found) >= count and not response:
                break
        assert len(found) == count
        return found

    def subscribe(self, topic: str) -> Instance:
        """Subscribe, and wait for partitions."""
        self.ok("POST", "/subscriptions", {"topics": [topic]})
        Scenario.wait_until(lambda: self.ok("GET", "/assignments")["partitions"], "the assignment")
        return self

    def wait_reading(self) -> None:
        """Wait until a read waits, by the table of instances: another read could take a record."""
        process, _, path = self.url.partition("/consumers/")
        table, name = f"{process}/adm/consumers?group={path.partition('/')[0]}", self.created.body["instance_id"]
        readers = lambda: [one["name"] for one in send("GET", table).body["consumers"] if one["isReading"]]  # noqa: E731
        Scenario.wait_until(lambda: name in readers(), "the read to wait")

    def first(self, query: str = "") -> list[Any]:
        """Read until there are records, once."""
        for _ in range(100):
            if response := self.ok("GET", f"/records?timeout=2000{query}"):
                return list(response)
        process = self.url.partition("/consumers/")[0]
        found = [send("GET", process + path).body for path in ("/health/readiness", "/adm/consumers")]
        raise AssertionError(f"no records arrived: {found}")

    def open(self, accept: str = "*/*", query: str = "", receive_bytes: int = 0, **headers: str) -> Connection:
        """Begin a read on a connection of its own."""
        return Connection(f"{self.url}/records{query}", {"Accept": accept, **headers}, receive_bytes)


class Connection:
    """A request whose response is read in parts."""

    def __init__(self, url: str, headers: Mapping[str, str], receive_bytes: int = 0) -> None:
        parts = urlsplit(url)
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(_LIMIT_SECONDS)
        self.socket.connect((parts.hostname, parts.port))
        self.data = b""
        lines = [f"GET {parts.path}?{parts.query} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def until(self, holds: Callable[[bytes], Any]) -> bytes:
        """Receive until a condition holds for all bytes."""
        while not holds(self.data):
            try:
                more = self.socket.recv(65_536)
            except TimeoutError:
                raise AssertionError(f"nothing more arrives behind {self.data[-900:]!r}") from None
            if not more:
                raise AssertionError(f"the response ended: {self.data[-300:]!r}")
            self.data += more
        return self.data

    def rest(self) -> bytes:
        """Receive until the connection or the chunked response ends."""
        while not self.data.endswith(b"0\r\n\r\n") and (more := self.socket.recv(65_536)):
            self.data += more
        return self.data

    @property
    def text(self) -> str:
        """The body of a chunked response."""
        _, _, left = self.data.partition(b"\r\n\r\n")
        body = b""
        while left:
            size, _, left = left.partition(b"\r\n")
            body += left[: int(size or b"0", 16)]
            left = left[int(size or b"0", 16) + 2 :]
        return body.decode()

    def events(self, count: int) -> list[tuple[str, Any]]:
        """Receive this many events: id and data of each."""

        def found() -> list[tuple[str, Any]]:
            blocks = [
                dict(line.split(": ", 1) for line in block.split("\n"))
                for block in self.text.split("\n\n")[:-1]
                if not block.startswith(":")
            ]
            return [(block["id"], json.loads(block["data"])) for block in blocks if "data" in block]

        self.until(lambda data: b"\r\n\r\n" in data and data.endswith(b"\r\n") and len(found()) >= count)
        return found()

    def cut(self) -> None:
        """Close with a reset, so that nothing more is received."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def write(site: Scenario, topic: str, *values: bytes | None, partition: int = 0) -> None:
    """Write values with the key `k`."""
    site.write(topic, *(OutgoingRecord(topic, b"k", value, None, partition) for value in values))


def offsets_of(records: list[Any], partition: int = 0) -> list[int]:
    """Return the offsets of a partition's entries."""
    return [record["offset"] for record in records if record["partition"] == partition]
