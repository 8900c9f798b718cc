"""Statements that reach for more than they may: each ends in time, and the process next to the engine stays fast."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_devkit.testing import Cluster, SharedHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.table_process import TableProcess, TableResponse, principals

pytestmark = pytest.mark.timeout(400)

FILE = Path(__file__).parents[2] / "hostile_statements.yaml"
HOSTILE = yaml.safe_load(FILE.read_text())
LIMIT_SECONDS = 1.0
LONGEST_SECONDS = 20.0
"""Of a response: the time limit, the grace of the engine, and a busy machine."""
LIVENESS_SECONDS = 2.0
"""Far more than it takes, so that only a loop that is held is red."""
AT_A_TIME = 4
ROW = "/tables/stock/rows/k1"
COUNT = "SELECT count(*) FROM moves"


@pytest.fixture(scope="module")
def hostile(kafka: Cluster, module_headrace: SharedHeadrace, tmp_path_factory: pytest.TempPathFactory) -> TableProcess:
    """A process with two tables, of which the reader may read one."""
    scenario = Scenario(kafka.bootstrap_servers, tmp_path_factory.mktemp("hostile"))
    for topic in ("hostile-moves", "hostile-secret"):
        kafka.create_topic(topic)
        scenario.write_json(topic, *({"item": f"i{n}", "n": n} for n in range(200)))
    columns = "item STRING, n BIGINT"
    tables = {name: {"topic": f"hostile-{name}", "schema": columns, "kind": "log"} for name in ("moves", "secret")}
    tables["stock"] = {"topic": "hostile-moves", "schema": columns}
    readers = {f"reader{number}": ["consume:hostile-moves"] for number in ("", *range(200))}
    security = principals({**readers, "everything": ["kafka:r"]})
    settings = {"tables": tables, "sql": {"memory_bytes": 128 << 20}, "security": security}
    made = TableProcess(module_headrace({**scenario.config, **settings}))
    made.wait_for(COUNT, [[200]], "reader")
    made.wait_for("SELECT count(*) FROM secret", [[200]], "everything")
    return made


class Meanwhile:
    """Sends a request all the while, and keeps the responses."""

    def __init__(self, process: TableProcess, path: str) -> None:
        self.responses: list[TableResponse] = []
        self._process, self._path = process, path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            try:
                self.responses.append(self._process.send("GET", self._path, token="everything"))
            except OSError as cause:
                self.responses.append(TableResponse(0, cause, 0))

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def bodies(step: int) -> Iterator[tuple[str, bytes]]:
    """Return hostile requests with their names, with one of this number of endless statements."""
    for sql in HOSTILE["endless"][::step]:
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
    """A running process rejects as `test_statements.py` shows; of another table a caller learns only its name."""
    wrong = []
    for sql, _ in HOSTILE["rejected"][::8]:
        response = hostile.ask(sql, "reader")
        if response.status not in (400, 403, 422) or "description" not in response.body:
            wrong.append((sql, response))
    assert wrong == []
    listed = hostile.send("GET", "/tables", token="reader").body["tables"]
    assert [table["name"] for table in listed] == ["moves", "stock"]
    for path in ("/tables/secret", "/tables/secret/rows/k1"):
        assert hostile.send("GET", path, token="reader").status == 403
    assert hostile.ask("SELECT count(*) FROM secret", "everything").rows == [[200]]


def test_endless_statements_end_and_hold_nothing(hostile: TableProcess, request: pytest.FixtureRequest) -> None:
    """Several at a time: by their time limit, or with a 503 when the engine is ended; it comes back from its files.

    With `--all` these are all statements, otherwise each fourth one.
    """
    wrong: list[Any] = []

    def send(case: tuple[int, tuple[str, bytes]]) -> None:
        number, (name, body) = case  # a caller each, because one that ends the engine has to wait
        response = hostile.send("POST", "/query", body, f"reader{number}")
        while response.status == 429 or "starting" in str(response.body):
            time.sleep(0.1)  # others are at work, or another has ended the engine
            response = hostile.send("POST", "/query", body, f"reader{number}")
        status, answer, seconds, _ = response
        shown = str(answer.get("description", answer))[:300]
        print(f"{seconds:6.2f} s {status} {name[:80]} -> {shown[:150]}")
        if status not in (200, 400, 429, 503) or seconds > LONGEST_SECONDS:
            wrong.append((name, status, round(seconds, 1), shown))

    with Meanwhile(hostile, "/health/liveness") as liveness, ThreadPoolExecutor(AT_A_TIME) as threads:
        list(threads.map(send, enumerate(bodies(1 if request.config.getoption("--all") else 4))))
    assert wrong == []
    assert {response.status for response in liveness.responses} == {200}
    ordered = sorted(response.seconds for response in liveness.responses)
    late = ordered[int(len(ordered) * 0.99)]
    print(f"liveness: {len(ordered)} requests, p99 {late:.3f} s, worst {ordered[-1]:.3f} s")
    assert late < LIVENESS_SECONDS
    hostile.wait_for(COUNT, [[200]], "reader")


@pytest.mark.parametrize(
    "sql", [pytest.param(sql, marks=[pytest.mark.long] * bool(at)) for at, sql in enumerate(HOSTILE["uninterruptible"])]
)
def test_a_statement_that_cannot_be_interrupted_ends_statements_only(hostile: TableProcess, sql: str) -> None:
    """Rows by key are answered throughout; its caller waits longer each time, and no other caller does."""
    attacker = f"reader{150 + HOSTILE['uninterruptible'].index(sql)}"
    keeper = hostile.engine
    pauses: list[int] = []
    seen: list[TableResponse] = []

    def rejected() -> TableResponse:
        seen.append(hostile.ask("SELECT 1", attacker))
        return seen[-1]

    with Meanwhile(hostile, ROW) as victim:
        for number in range(2):
            runner = hostile.statements_engine
            assert hostile.ask(sql.format(n=number), attacker, timeout_seconds=1).status == 503
            Scenario.wait_until(lambda: rejected().status == 429, "a pause")
            pauses.append(seen[-1].retry_after)
            hostile.wait_for(COUNT, [[200]], "everything")
            assert hostile.statements_engine not in (0, runner)
            Scenario.wait_until(lambda: hostile.ask("SELECT 1", attacker).status == 200, "an end of the pause")
    assert 0 < pauses[0] < pauses[1]
    assert {response.status for response in victim.responses} == {200}
    assert hostile.engine == keeper


def test_requests_do_not_end_an_engine_that_starts(hostile: TableProcess) -> None:
    """They are answered at once, however short their time limit is, and the first engine that starts becomes ready."""
    Scenario.wait_until(lambda: hostile.engine, "an engine")
    killed = hostile.engine
    hostile.kill_engine()
    Scenario.wait_until(lambda: hostile.engine not in (0, killed), "another engine")
    keeper = hostile.engine
    os.kill(keeper, signal.SIGSTOP)
    try:
        until = time.monotonic() + 8
        while time.monotonic() < until:
            row = hostile.send("GET", ROW, token="everything")
            assert (row.status, row.retry_after) == (503, 1)
            assert row.body["description"].startswith("starting")
            assert row.seconds < LIVENESS_SECONDS
            assert hostile.ask(COUNT, "everything", timeout_seconds=0.5).status == 200
    finally:
        os.kill(keeper, signal.SIGCONT)
    Scenario.wait_until(lambda: hostile.send("GET", ROW, token="everything").status == 200, "a row again")
    assert hostile.engine == keeper
