"""Standing queries in a running process: rows of a table's topic reach the backend, whatever ends meanwhile."""

from __future__ import annotations

import json
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.table_process import TableProcess

SQL = 'SELECT key, n * 2 AS twice, "offset" AS at FROM stock WHERE n < 5 EMIT CHANGES'
RETRY = {"attempts": 2, "first_delay_seconds": 0.05, "max_delay_seconds": 0.2}


def kill_engine(process: HeadraceProcess) -> None:
    TableProcess(process).kill_engine()


def write(site: Scenario, topic: str, start: int, count: int) -> None:
    """Write a record for each offset from `start` on, whose `n` is the last digit of it."""
    values = [json.dumps({"item": "i", "n": offset % 10}).encode() for offset in range(start, start + count)]
    site.write(topic, *(OutgoingRecord(topic, b"k%d" % at, value) for at, value in enumerate(values, start)))


def rows_of(backend: RecordingBackend) -> set[int]:
    """Return the offsets of the records whose rows were accepted."""
    return {row["at"] for row in backend.accepted if isinstance(row, dict)}


def config_of(site: Scenario, topic: str, backend: RecordingBackend) -> dict[str, Any]:
    """Return a file with a query in batches, and one that sends each row alone as an array."""
    return {
        **site.config,
        "tables": {"stock": {"topic": topic, "schema": "item STRING, n BIGINT"}},
        "queries": {
            "low": {"sql": SQL, "backend": {"url": backend.url}, "retry": RETRY, "batch": {"max_records": 8}},
            "arrays": {
                "sql": "SELECT key, n FROM stock WHERE n = 1 EMIT CHANGES",
                "rows": "arrays",
                "group": f"{topic}-arrays",
                "dead_letter": {"topic": "{topic}.arrays"},
                "backend": {"url": backend.url.replace("records", "single"), "mode": "single"},
            },
        },
    }


def test_each_row_of_a_standing_query_reaches_the_backend(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Filter and columns; one bad row and one corrupt record are dead letters; nothing is lost with a process."""
    name = topic()
    backend.response = lambda request: PlannedResponse(
        400 if request.path == "/kafka/records" and any(row["at"] == 13 for row in request.body) else 200
    )
    write(site, name, 0, 20)
    site.write(name, OutgoingRecord(name, b"k20", b"{"), OutgoingRecord(name, b"k0", None))
    process = headrace(config_of(site, name, backend))
    site.wait_committed("headrace.query.low", name, 22)
    site.wait_committed(f"{name}-arrays", name, 22)
    expected = {offset for offset in range(20) if offset % 10 < 5 and offset != 13}
    assert rows_of(backend) == expected
    assert {"key": "k0", "twice": 0, "at": 0} in backend.accepted
    singles = [request for request in backend.requests if request.path == "/kafka/single"]
    assert [request.body for request in singles] == [["k1", 1], ["k11", 1]]
    assert singles[1].headers["idempotency-key"] == f"{name}-arrays:{name}:0:11"
    assert [(dead.key, dict(dead.headers)["headrace.dlq.error"]) for dead in site.records(f"{name}.dlq")] == [
        (b"k13", b"HTTP 400"),
        (b"k20", b"DecodeError"),
    ]
    listed = site.ask(f"{process.url}/adm/reactive-consumers/low").body
    assert listed["group"] == "headrace.query.low"

    kill_engine(process)
    write(site, name, 22, 230)
    backend.wait_for(lambda b: max(rows_of(b)) > 60)
    process.kill()
    write(site, name, 252, 10)
    process.start()
    site.wait_committed("headrace.query.low", name, 262)
    expected |= {offset for offset in range(22, 262) if offset % 10 < 5}
    assert rows_of(backend) == expected
    assert len(site.records(f"{name}.dlq")) == 2

    backend.response = PlannedResponse()
    site.cli("dlq", "redrive", f"{name}.dlq")
    backend.wait_for(lambda b: any(isinstance(row, dict) and row["key"] == "k13" for row in b.accepted))
