"""Several processes behind one address: an instance is served through any of them, by the one that has it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
import ssl
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from raw_server import Authority, end_all

from headrace.devcluster.headrace import HeadraceProcess
from headrace.devcluster.ports import free_ports
from headrace.records import OutgoingRecord
from headrace.runtime import LoopThread
from headrace.testing.scenario import Scenario

SECRET = "a secret that is long enough to sign with"
TOKENS = {"ann": "the token of ann, long enough", "bob": "the token of bob, long enough"}


class Response(NamedTuple):
    status: int
    body: Any
    headers: Any

    @property
    def reason(self) -> str:
        return self.body["metadata"]["reason"] if self.status >= 400 else ""


def send(
    method: str,
    url: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Response:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", "Connection": "close", **(headers or {})}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as response:
            text = response.read()
            return Response(response.status, json.loads(text) if text else None, response.headers)
    except urllib.error.HTTPError as response:
        with response:
            return Response(response.code, json.load(response), response.headers)


class RoundRobin:
    """A load balancer: each connection is to the next process that accepts one."""

    def __init__(self, urls: list[str]) -> None:
        self.used: Counter[int] = Counter()
        self._ports = itertools.cycle([int(url.rpartition(":")[2]) for url in urls])
        self._many = len(urls)
        self._connections: list[Any] = []
        self._ends: list[asyncio.StreamWriter] = []
        self._thread = LoopThread("round-robin")
        self._server = self._thread.call(asyncio.start_server(self._serve, "127.0.0.1", 0), 30)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._thread.call(end_all(self._server, self._connections, self._ends), 30)
        self._thread.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.current_task())
        self._ends.append(writer)
        for port in itertools.islice(self._ports, self._many):
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", port)
                self._ends.append(back)
                self.used[port] += 1
                tasks = [asyncio.ensure_future(each) for each in (self._copy(reader, back), self._copy(there, writer))]
                self._connections += tasks
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for each in tasks:
                    each.cancel()
                back.close()
                break
        writer.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()


class Processes:
    """Processes of one deployment."""

    def __init__(self, start: Callable[..., HeadraceProcess], config: dict[str, Any], count: int = 3) -> None:
        ports = free_ports(count)
        scheme = "https" if "tls" in config.get("http", {}) else "http"
        self.urls = [f"{scheme}://127.0.0.1:{port}" for port in ports]
        self._topic = f"_control-{uuid.uuid4().hex[:12]}"
        self._start, self._config = start, config
        self.processes = [self.start(url) for url in self.urls]
        for process in self.processes:
            process.wait_ready()

    def start(self, url: str, cluster: Mapping[str, Any] | None = None, **env: str) -> HeadraceProcess:
        given = {**self._config.get("cluster", {}), **(cluster or {})}
        config = {
            **self._config,
            "cluster": {"url": url, "peers": self.urls, "secret": "${env:SECRET}", **given},
            "http": {**self._config.get("http", {}), "port": int(url.rpartition(":")[2])},
            "control": {"topic": self._topic},
        }
        return self._start(
            config, wait=False, env={"SECRET": SECRET, "BOB": TOKENS["bob"], "ANN": TOKENS["ann"], **env}
        )


@pytest.fixture
def site(kafka: Any, tmp_path: Path) -> Scenario:
    return Scenario(kafka.bootstrap_servers, tmp_path)


@pytest.fixture
def three(site: Scenario, headrace: Callable[..., HeadraceProcess]) -> Processes:
    return Processes(headrace, {**site.config, "active_consumers": {"auto_offset_reset": "earliest"}})


@pytest.fixture
def balancer(three: Processes) -> Iterator[RoundRobin]:
    balancer = RoundRobin(three.urls)
    yield balancer
    balancer.close()


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


def write(site: Scenario, topic: str, first: int, end: int, size: int = 10) -> None:
    values = [json.dumps({"n": n, "text": "x" * size}).encode() for n in range(first, end)]
    site.write(topic, *(OutgoingRecord(topic, None, value, None, 0) for value in values))


def create(url: str, group: str, topic: str, **settings: Any) -> str:
    """Create and subscribe an instance, and return its path."""
    created = send("POST", f"{url}/consumers/{group}", settings)
    assert created.status == 200, created
    path: str = created.body["base_uri"]
    assert send("POST", url + path + "/subscriptions", {"topics": [topic]}).status == 204
    return path


def numbers(url: str, count: int, query: str = "") -> list[int]:
    """Read until there are so many records."""
    found: list[int] = []
    for _ in range(30):
        response = send("GET", f"{url}/records?timeout=2000{query}")
        assert response.status == 200, response
        found += [record["value"]["n"] for record in response.body]
        if len(found) >= count:
            break
    return found


def test_every_operation_through_any_process(
    site: Scenario, three: Processes, balancer: RoundRobin, topic: Callable[..., str], group: str
) -> None:
    name = topic()
    write(site, name, 0, 20)
    url = balancer.url + create(balancer.url, group, name)
    assert numbers(url, 20, "&max_records=7") == list(range(20))
    assert send("POST", url + "/offsets?offsets=true").body == [
        {"topic": name, "partition": 0, "offset": 20, "metadata": ""}
    ]
    assert send("PUT", url + "/offsets", {"partitions": [{"topic": name, "partition": 0}]}).body["offsets"]
    position = {"topic": name, "partition": 0, "offset": 15}
    assert send("POST", url + "/positions", {"offsets": [position]}).status == 204
    assert numbers(url, 5) == list(range(15, 20))
    assert send("POST", url + "/positions/first", {"partitions": []}).status == 204
    assert numbers(url, 20) == list(range(20))
    assert send("GET", url + "/subscriptions").body == {"topics": [name]}
    assert send("GET", url + "/assignments").body == {"partitions": [{"topic": name, "partition": 0}]}
    assert send("GET", url + "/records?max_records=0").status == 400
    assert send("DELETE", url).status == 204
    assert [send("GET", url + "/subscriptions").status for _ in three.urls] == [404] * 3
    assert len(balancer.used) == 3
    assert min(balancer.used.values()) > 4


def test_a_commit_right_after_a_read_counts_what_was_read(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str
) -> None:
    name = topic()
    write(site, name, 0, 300)
    path = create(three.urls[0], group, name)
    for count in range(1, 101):
        (record,) = send("GET", f"{three.urls[count % 2 + 1]}{path}/records?timeout=20000&max_records=1").body
        committed = send("POST", f"{three.urls[(count + 1) % 3]}{path}/offsets?offsets=true").body
        assert (record["offset"] + 1, committed[0]["offset"]) == (count, count)


def test_a_transaction_with_offsets_through_another_process(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str
) -> None:
    """It is written once and commits the offset; the same key is answered as before, through any process."""
    name, target = topic(), topic()
    write(site, name, 0, 3)
    path = create(three.urls[0], group, name)
    assert numbers(three.urls[1] + path, 3) == [0, 1, 2]
    offsets = [{"topic": name, "partition": 0, "offset": 2}]
    body = {
        "topics": [{"topic": target, "records": [{"value": {"n": 1}}]}],
        "consumer": {"group": group, "instanceId": path.rpartition("/")[2], "offsets": offsets},
    }
    key = {"Idempotency-Key": "transaction-1"}
    first = send("POST", three.urls[1] + "/transactions", body, key)
    assert first.status == 200, first
    assert send("POST", three.urls[2] + "/transactions", body, key).body == first.body
    found = send("PUT", f"{three.urls[2]}{path}/offsets", {"partitions": [{"topic": name, "partition": 0}]})
    assert [one["offset"] for one in found.body["offsets"]] == [3]
    assert send("POST", three.urls[2] + "/transactions", body).status == 409
    records = send("GET", f"{three.urls[0]}/topics/{target}/partitions/0/records?offset=0")
    assert len(records.body["records"]) == 1


def test_an_instance_of_a_killed_process_is_gone_and_its_commits_are_not(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str
) -> None:
    name = topic()
    write(site, name, 0, 10)
    first, second, third = three.urls
    path = create(first, group, name, name="one")
    assert numbers(second + path, 4, "&max_records=4") == [0, 1, 2, 3]
    assert send("POST", third + path + "/offsets").status == 200
    assert numbers(third + path, 3, "&max_records=3") == [4, 5, 6]
    three.processes[0].kill()
    responses = []

    def is_gone() -> bool:
        responses.append(send("GET", second + path + "/assignments"))
        return responses[-1].status == 410

    site.wait_until(is_gone, "410")
    assert {(response.status, response.reason) for response in responses} == {
        (503, "owner_unavailable"),
        (410, "instance_gone"),
    }
    assert all(response.headers["Retry-After"] for response in responses[:-1])
    assert send("POST", third + path + "/offsets").reason == "instance_gone"
    assert create(third, group, name, name="one") == path
    assert numbers(second + path, 6) == [4, 5, 6, 7, 8, 9]

    three.processes[0].start()
    three.processes[0].wait_ready()
    assert send("GET", first + path + "/assignments").status == 200


def test_an_instance_of_a_stopped_or_restarted_process_is_gone_at_once(
    three: Processes, topic: Callable[..., str], group: str
) -> None:
    name = topic()
    first, second, third = three.urls
    stopped, killed = create(first, group, name), create(second, group, name)
    three.processes[0].terminate()
    assert send("GET", third + stopped + "/assignments").reason == "instance_gone"
    three.processes[1].kill()
    three.processes[1].start()
    three.processes[1].wait_ready()
    assert send("GET", third + killed + "/assignments").reason == "instance_gone"
    assert send("GET", second + killed + "/assignments").reason == "instance_gone"


def test_of_two_processes_one_creates_an_instance(three: Processes, group: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        for n in range(20):
            urls = [f"{url}/consumers/{group}" for url in three.urls]
            responses = list(pool.map(lambda url, name=f"c{n}": send("POST", url, {"name": name}), urls))
            assert sorted(response.status for response in responses) == [200, 409, 409]
            assert {response.reason for response in responses} == {"", "consumer_already_exists"}
            served = [send("DELETE", f"{url}/consumers/{group}/instances/c{n}").status for url in three.urls[:2]]
            assert served == [204, 404]


def test_only_a_process_with_the_secret_forwards(three: Processes, topic: Callable[..., str], group: str) -> None:
    path = create(three.urls[0], group, topic())
    forged = send("GET", three.urls[0] + path + "/assignments", None, {"X-Headrace-Forwarded": "e30=.0123456789abcdef"})
    assert (forged.status, forged.reason) == (403, "forward_refused")

    three.processes[1].kill()
    other = three.start(three.urls[1], SECRET="another secret that is long enough to sign with")
    other.wait_ready()
    response = send("GET", other.url + path + "/assignments")
    assert (response.status, response.reason) == (503, "owner_unavailable")
    assert "cluster.secret" in response.body["description"]


def test_an_instance_exists_for_its_principal_only(
    site: Scenario, headrace: Callable[..., HeadraceProcess], topic: Callable[..., str], group: str
) -> None:
    principals = {name: {"token": f"${{env:{name.upper()}}}", "scopes": ["kafka:r", "kafka:w"]} for name in TOKENS}
    config = {**site.config, "security": {"mode": "token", "principals": principals}}
    first, second = Processes(headrace, config, 2).urls
    ann, bob = ({"Authorization": f"Bearer {token}"} for token in TOKENS.values())
    created = send("POST", f"{first}/consumers/{group}", {}, ann)
    path = created.body["base_uri"]
    name = topic()
    assert send("POST", second + path + "/subscriptions", {"topics": [name]}, ann).status == 204
    assert send("GET", second + path + "/subscriptions", None, ann).body == {"topics": [name]}
    for url in (first, second):
        refused = send("GET", url + path + "/subscriptions", None, bob)
        assert (refused.status, refused.reason) == (404, "consumer_instance_not_found")
        assert send("GET", url + path + "/subscriptions").status == 401


def test_requests_between_processes_are_over_tls(
    site: Scenario, headrace: Callable[..., HeadraceProcess], topic: Callable[..., str], group: str, tmp_path: Path
) -> None:
    """Each process shows a certificate and requires one; a peer without it, or with other authorities, gets nothing."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    authority.issue("process")
    for file in tmp_path.glob("*.key"):
        file.chmod(0o600)
    shown = {"certificate": str(tmp_path / "process.pem"), "key": str(tmp_path / "process.key")}
    http, tls = {**shown, "client_ca": str(authority.file)}, {**shown, "ca": str(authority.file)}
    processes = Processes(headrace, {**site.config, "http": {"tls": http}, "cluster": {"tls": tls}})
    first, second, third = processes.urls
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(*shown.values())
    name, many = topic(), 300
    site.write(name, *(OutgoingRecord(name, None, b"%d" % n + b" " * 1000, None, 0) for n in range(many)))
    path = send("POST", f"{first}/consumers/{group}", {"valueFormat": "string"}, context=context).body["base_uri"]
    partition = {"partitions": [{"topic": name, "partition": 0}]}
    assert send("POST", second + path + "/assignments", partition, context=context).status == 204
    assert send("POST", second + path + "/positions/first", partition, context=context).status == 204
    found: list[int] = []
    while len(found) < many:
        read = send("GET", f"{second}{path}/records?timeout=20000&max_bytes=2000000", context=context)
        assert read.status == 200, read
        found += [record["offset"] for record in read.body]
    assert found == list(range(many))
    assert send("POST", f"{third}{path}/offsets?offsets=true", context=context).body[0]["offset"] == many
    for given in ({"ca": str(authority.file)}, {**shown, "ca": str(stranger.file)}):
        processes.processes[2].kill()
        processes.processes[2] = processes.start(third, {"tls": given})
        processes.processes[2].wait_ready()
        refused = send("GET", third + path + "/assignments", context=context)
        assert (refused.status, refused.reason) == (503, "owner_unavailable")


def open_read(url: str, path: str, headers: str = "", receive_bytes: int = 0) -> socket.socket:
    """Send a read, and return the connection."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(15)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    return connection


def receive_until(connection: socket.socket, text: bytes) -> bytes:
    received = b""
    while text not in received:
        data = connection.recv(65_536)
        assert data, received[-500:]
        received += data
    return received


def begin_read(site: Scenario, url: str, path: str, other_url: str) -> socket.socket:
    """Return the connection of a read that waits for records."""
    found: list[socket.socket] = []

    def waits() -> bool:
        connection = open_read(url, path + "/records?timeout=30000")
        is_busy = send("GET", f"{other_url}{path}/records?timeout=1").status == 409
        if is_busy and not select.select([connection], [], [], 0)[0]:
            found.append(connection)
            return True
        connection.close()
        return False

    site.wait_until(waits, "a read that waits")
    return found[0]


def test_a_client_that_leaves_while_its_read_waits(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str
) -> None:
    name = topic()
    first, second, third = three.urls
    path = create(first, group, name)
    begin_read(site, second, path, third).close()
    site.wait_until(lambda: send("GET", f"{third}{path}/records?timeout=1").status == 200, "the read to end")
    write(site, name, 0, 10)
    assert numbers(third + path, 10) == list(range(10))


@pytest.mark.parametrize("many", [1200, 10], ids=["not-written", "written"])
def test_a_client_that_leaves_before_it_has_its_response_gets_the_records_again(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str, many: int
) -> None:
    """The response is larger than what the systems buffer of a connection, or than what the client's does."""
    name = topic()
    site.write(name, *(OutgoingRecord(name, None, b"\x01" * 1000, None, 0) for _ in range(many)))
    first, second, third = three.urls
    path = create(first, group, name, valueFormat="string")
    site.wait_until(lambda: send("GET", third + path + "/assignments").body["partitions"], "an assignment")
    blocked = open_read(second, f"{path}/records?timeout=30000&max_bytes=2000000", receive_bytes=4096)
    receive_until(blocked, b"\r\n\r\n")
    assert send("GET", f"{third}{path}/records").status == 409
    assert send("POST", f"{third}{path}/offsets?offsets=true").body == []
    blocked.close()
    found: list[int] = []

    def reads() -> bool:
        response = send("GET", f"{third}{path}/records?timeout=1000&max_bytes=2000000")
        found.extend(record["offset"] for record in response.body if response.status == 200)
        return len(found) >= many

    site.wait_until(reads, "all records")
    assert found == list(range(many))


def test_a_stream_through_another_process(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str
) -> None:
    name = topic()
    first, second, third = three.urls
    path = create(first, group, name)
    write(site, name, 0, 1000)
    stream = open_read(second, path + "/records", "Accept: text/event-stream\r\n")
    head = receive_until(stream, b'"n": 999,')
    assert b"content-type: text/event-stream" in head
    assert head.count(b"\ndata: ") == 1000
    assert send("GET", f"{third}{path}/records").status == 409
    assert send("POST", f"{third}{path}/offsets").status == 409  # only the client knows what has arrived
    write(site, name, 1000, 1010)
    receive_until(stream, b'"n": 1009,')
    stream.close()
    last = json.dumps({name: {"0": 995}})
    again = open_read(third, path + "/records", f"Accept: application/x-ndjson\r\nLast-Event-ID: {last}\r\n")
    received = receive_until(again, b'"n": 1009,')
    assert received.count(b'"offset":') == 15
    again.close()


def test_a_slow_client_of_a_stream_slows_down_the_process_that_has_the_instance(
    site: Scenario, three: Processes, topic: Callable[..., str], group: str
) -> None:
    name, many = topic(), 4000
    site.write(name, *(OutgoingRecord(name, None, b"\x01" * 1000, None, 0) for _ in range(many)))
    first, second, third = three.urls
    path = create(first, group, name, valueFormat="string")
    records = path + "/records?delivery=at_most_once"
    stream = open_read(second, records, "Accept: application/x-ndjson\r\n", receive_bytes=4096)
    receive_until(stream, b'"offset":0')
    committed: list[Any] = []

    def waits() -> bool:
        committed.append(send("POST", f"{third}{path}/offsets?offsets=true").body)
        return len(committed) > 1 and committed[-1] == []

    site.wait_until(waits, "the stream to wait for its client")
    assert max(one[0]["offset"] for one in committed if one) < many - 1000
    stream.close()
