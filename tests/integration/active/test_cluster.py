"""Several processes behind one address: an instance is served through any of them, by the one that has it."""

from __future__ import annotations

import json
import ssl
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from active_client import Connection, send
from headrace.http.endpoint import endpoints_of
from headrace.records import OutgoingRecord
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace_devkit.devcluster.headrace import HeadraceProcess
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, MakeTopic, SharedHeadrace, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from raw_server import Authority

SECRET = "a secret that is long enough to sign with"
TOKENS = {"ANN": "the token of ann, long enough", "BOB": "the token of bob, long enough"}


@pytest.fixture(scope="module", autouse=True)
def secrets() -> Iterator[None]:
    """The variables of every process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SECRET": SECRET, **TOKENS}.items():
            patch.setenv(name, value)
        yield


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
        return self._start(config, wait=False, env=env)


def of_three(start: Callable[..., HeadraceProcess], kafka: Cluster, folder: Path) -> Processes:
    config = Scenario(kafka.bootstrap_servers, folder).config
    return Processes(start, {**config, "active_consumers": {"auto_offset_reset": "earliest"}})


@pytest.fixture(scope="module")
def three(kafka: Cluster, module_headrace: SharedHeadrace, tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """Processes that no test ends."""
    return of_three(lambda config, **_: module_headrace(config), kafka, tmp_path_factory.mktemp("three"))


@pytest.fixture
def own(kafka: Cluster, headrace: StartHeadrace, tmp_path: Path) -> Processes:
    """Processes that a test may end."""
    return of_three(headrace, kafka, tmp_path)


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


def write(site: Scenario, topic: str, first: int, end: int) -> None:
    site.write_json(topic, *({"n": n, "text": "x"} for n in range(first, end)))


def create(url: str, group: str, topic: str, **settings: Any) -> str:
    """Create and subscribe an instance, and return its path."""
    created = send("POST", f"{url}/consumers/{group}", settings)
    assert created.status == 200, created
    path: str = created.body["base_uri"]
    assert send("POST", url + path + "/subscriptions", {"topics": [topic]}).status == 204
    return path


def numbers(url: str, count: int, query: str = "") -> list[int]:
    """Read until there are this many records."""
    found: list[int] = []
    for _ in range(30):
        response = send("GET", f"{url}/records?timeout=2000{query}")
        assert response.status == 200, response
        found += [record["value"]["n"] for record in response.body]
        if len(found) >= count:
            break
    return found


def test_a_transaction_with_offsets_through_another_process(
    site: Scenario, three: Processes, topic: MakeTopic, group: str
) -> None:
    """It is written once and commits the offset; the same key gets the same response."""
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
    site: Scenario, own: Processes, topic: MakeTopic, group: str
) -> None:
    name = topic()
    write(site, name, 0, 10)
    first, second, third = own.urls
    path = create(first, group, name, name="one")
    assert numbers(second + path, 4, "&max_records=4") == [0, 1, 2, 3]
    assert send("POST", third + path + "/offsets").status == 200
    assert numbers(third + path, 3, "&max_records=3") == [4, 5, 6]
    own.processes[0].kill()
    responses = []

    def is_gone() -> bool:
        responses.append(send("GET", second + path + "/assignments"))
        return responses[-1].status == 410

    site.wait_until(is_gone, "410")
    assert {(response.status, response.reason) for response in responses} == {
        (503, "owner_unavailable"),
        (410, "instance_gone"),
    }
    assert send("POST", third + path + "/offsets").reason == "instance_gone"
    assert create(third, group, name, name="one") == path
    assert numbers(second + path, 6) == [4, 5, 6, 7, 8, 9]

    own.processes[0].start()
    own.processes[0].wait_ready()
    assert send("GET", first + path + "/assignments").status == 200


def test_of_two_processes_one_creates_an_instance(three: Processes, group: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        for n in range(5):
            urls = [f"{url}/consumers/{group}" for url in three.urls]
            responses = list(pool.map(lambda url, name=f"c{n}": send("POST", url, {"name": name}), urls))
            assert sorted(response.status for response in responses) == [200, 409, 409]
            assert {response.reason for response in responses} == {"", "consumer_already_exists"}
            served = [send("DELETE", f"{url}/consumers/{group}/instances/c{n}").status for url in three.urls[:2]]
            assert served == [204, 404]


def test_only_a_process_with_the_secret_forwards(own: Processes, topic: MakeTopic, group: str) -> None:
    path = create(own.urls[0], group, topic())
    forged = send("GET", own.urls[0] + path + "/assignments", None, {"X-Headrace-Forwarded": "e30=.0123456789abcdef"})
    assert (forged.status, forged.reason) == (403, "forward_refused")

    own.processes[1].kill()
    other = own.start(own.urls[1], SECRET="another secret that is long enough to sign with")
    other.wait_ready()
    response = send("GET", other.url + path + "/assignments")
    assert (response.status, response.reason) == (503, "owner_unavailable")
    assert "cluster.secret" in response.body["description"]


def test_an_instance_exists_for_its_principal_only(
    site: Scenario, headrace: StartHeadrace, topic: MakeTopic, group: str
) -> None:
    principals = {name: {"token": f"${{env:{name}}}", "scopes": ["kafka:r", "kafka:w"]} for name in TOKENS}
    config = {**site.config, "security": {"mode": "token", "principals": principals}}
    first, second = Processes(headrace, config, 2).urls
    ann, bob = ({"Authorization": f"Bearer {token}"} for token in TOKENS.values())
    created = send("POST", f"{first}/consumers/{group}", {}, ann)
    path = created.body["base_uri"]
    name = topic()
    assert send("POST", second + path + "/subscriptions", {"topics": [name]}, ann).status == 204
    assert send("GET", second + path + "/subscriptions", None, ann).body == {"topics": [name]}
    for url in (first, second):
        for one in endpoints_of(ActiveEndpoints):
            if "{instance}" in one.path:
                refused = send(one.method, url + path + one.path.partition("{instance}")[2], one.example, bob)
                assert (refused.status, refused.reason) == (404, "consumer_instance_not_found"), one.id
        assert send("GET", url + path + "/subscriptions").status == 401
    partition = {"topic": name, "partition": 0, "offset": 0}
    consumer = {"group": group, "instanceId": path.rpartition("/")[2], "offsets": [partition]}
    body = {"topics": [{"topic": name, "records": [{"value": 1}]}], "consumer": consumer}
    own, foreign = (send("POST", first + "/transactions", body, who).code for who in (ann, bob))
    assert own in ("ERR12207", "ERR40066") and foreign == "ERR12200"  # before or after the assignment


def test_requests_between_processes_are_over_tls(
    site: Scenario, headrace: StartHeadrace, topic: MakeTopic, group: str, tmp_path: Path
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


def test_a_client_that_leaves_before_it_has_its_response_gets_the_records_again(
    site: Scenario, three: Processes, topic: MakeTopic, group: str
) -> None:
    """The response is larger than what the systems buffer of a connection."""
    name, many = topic(), 1200
    site.write(name, *(OutgoingRecord(name, None, b"\x01" * 1000, None, 0) for _ in range(many)))
    first, second, third = three.urls
    path = create(first, group, name, valueFormat="string")
    site.wait_until(lambda: send("GET", third + path + "/assignments").body["partitions"], "an assignment")
    blocked = Connection(f"{second}{path}/records?timeout=30000&max_bytes=2000000", {}, receive_bytes=4096)
    blocked.until(lambda data: b"\r\n\r\n" in data)
    assert send("GET", f"{third}{path}/records").status == 409
    assert send("POST", f"{third}{path}/offsets?offsets=true").body == []
    blocked.socket.close()
    found: list[int] = []

    def reads() -> bool:
        response = send("GET", f"{third}{path}/records?timeout=1000&max_bytes=2000000")
        found.extend(record["offset"] for record in response.body if response.status == 200)
        return len(found) >= many

    site.wait_until(reads, "all records")
    assert found == list(range(many))


def test_a_stream_through_another_process(site: Scenario, three: Processes, topic: MakeTopic, group: str) -> None:
    name = topic()
    first, second, third = three.urls
    path = create(first, group, name)
    write(site, name, 0, 1000)
    stream = Connection(f"{second}{path}/records", {"Accept": "text/event-stream"})
    received = stream.until(lambda data: b'"n": 999,' in data)
    assert b"content-type: text/event-stream" in received
    assert received.count(b"\ndata: ") == 1000
    assert send("GET", f"{third}{path}/records").status == 409
    assert send("POST", f"{third}{path}/offsets").status == 409  # only the client knows what has arrived
    write(site, name, 1000, 1010)
    stream.until(lambda data: b'"n": 1009,' in data)
    stream.socket.close()
    last = json.dumps({name: {"0": 995}})
    again = Connection(f"{third}{path}/records", {"Accept": "application/x-ndjson", "Last-Event-ID": last})
    received = again.until(lambda data: b'"n": 1009,' in data)
    assert received.count(b'"offset":') == 15
    again.socket.close()
