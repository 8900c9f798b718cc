"""Statements that reach for more than they may: each ends in time, and the process next to the engine stays fast."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.testing import Cluster
from headrace.testing.scenario import Scenario
from tests.table_process import TableProcess, principals

pytestmark = pytest.mark.timeout(400)

FILE = Path(__file__).parents[2] / "hostile_statements.yaml"
HOSTILE = yaml.safe_load(FILE.read_text())
LIMIT_SECONDS = 1.0
LONGEST_SECONDS = 20.0
"""Of a response: the time limit, the grace of the engine, and a busy machine."""
LIVENESS_SECONDS = 2.0
"""Far more than it takes, so that only a loop that is held is red."""
AT_A_TIME = 4
COUNT = "SELECT count(*) FROM moves"


@pytest.fixture(scope="module")
def hostile(kafka: Cluster, module_headrace: Any, tmp_path_factory: pytest.TempPathFactory) -> TableProcess:
    """A process with two tables, of which the reader may read one."""
    scenario = Scenario(kafka.bootstrap_servers, tmp_path_factory.mktemp("hostile"))
    for topic in ("hostile-moves", "hostile-secret"):
        kafka.create_topic(topic)
        scenario.write_json(topic, *({"item": f"i{n}", "n": n} for n in range(200)))
    columns = "item STRING, n BIGINT"
    tables = {name: {"topic": f"hostile-{name}", "schema": columns, "kind": "log"} for name in ("moves", "secret")}
    security = principals({"reader": ["consume:hostile-moves"], "everything": ["kafka:r"]})
    settings = {"tables": tables, "sql": {"memory_bytes": 128 << 20}, "security": security}
    made = TableProcess(module_headrace({**scenario.config, **settings}))
    made.wait_for(COUNT, [[200]], "reader")
    made.wait_for("SELECT count(*) FROM secret", [[200]], "everything")
    return made


class Liveness:
    """Asks for the liveness of a process all the while, and keeps how long each response took."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self._url = f"{url}/health/liveness"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            began = time.monotonic()
            with urllib.request.urlopen(self._url, timeout=30) as response:
                assert response.status == 200
            self.seconds.append(time.monotonic() - began)

    def __enter__(self) -> Liveness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def bodies() -> Iterator[tuple[str, bytes]]:
    """Return hostile requests with their names."""
    for sql in HOSTILE["endless"]:
        yield sql, json.dumps({"sql": sql, "timeout_seconds": LIMIT_SECONDS}).encode()
    for begin, part, times, middle, end, ends in HOSTILE["long"]:
        sql = begin + part * times + middle + end * ends
        yield sql[:60], json.dumps({"sql": sql, "timeout_seconds": LIMIT_SECONDS}).encode()
    for text in HOSTILE["parameters"]:
        yield text, b'{"sql":"SELECT ? AS v","timeout_seconds":1,"params":%b}' % text.encode()
    depth = 100_000
    yield "deep parameters", b'{"sql":"SELECT ?","params":' + b"[" * depth + b"]" * depth + b"}"
    yield "many parameters", b'{"sql":"SELECT ?","params":[' + b"1," * 300_000 + b"1]}"


def test_hostile_statements_reach_nothing(hostile: TableProcess) -> None:
    """Each is rejected by a running process; of another table a caller learns no more than its name."""
    wrong = []
    for sql, _ in HOSTILE["rejected"]:
        response = hostile.ask(sql, "reader")
        if response.status not in (400, 403, 422) or "description" not in response.body:
            wrong.append((sql, response))
    assert wrong == []
    listed = hostile.send("GET", "/tables", token="reader").body["tables"]
    assert [table["name"] for table in listed] == ["moves"]
    for path in ("/tables/secret", "/tables/secret/rows/k1"):
        assert hostile.send("GET", path, token="reader").status == 403
    assert hostile.ask("SELECT count(*) FROM secret", "everything").rows == [[200]]


def test_endless_statements_end_and_hold_nothing(hostile: TableProcess) -> None:
    """Several at a time: by their time limit, or with a 503 when the engine is ended; it comes back from its files."""
    wrong: list[Any] = []

    def send(case: tuple[str, bytes]) -> None:
        name, body = case
        response = hostile.send("POST", "/query", body, "reader")
        while response.status == 429 or "is starting" in str(response.body):
            time.sleep(0.1)  # others are at work, or another has ended the engine
            response = hostile.send("POST", "/query", body, "reader")
        status, answer, seconds = response
        shown = str(answer.get("description", answer))[:300]
        print(f"{seconds:6.2f} s {status} {name[:80]} -> {shown[:150]}")
        if status not in (200, 400, 429, 503) or seconds > LONGEST_SECONDS:
            wrong.append((name, status, round(seconds, 1), shown))

    with Liveness(hostile.process.url) as liveness, ThreadPoolExecutor(AT_A_TIME) as threads:
        list(threads.map(send, bodies()))
    assert wrong == []
    ordered = sorted(liveness.seconds)
    late = ordered[int(len(ordered) * 0.99)]
    print(f"liveness: {len(ordered)} requests, p99 {late:.3f} s, worst {ordered[-1]:.3f} s")
    assert late < LIVENESS_SECONDS
    hostile.wait_for(COUNT, [[200]], "reader")
