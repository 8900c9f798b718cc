"""The pipeline of `examples/audit`: events of real requests are rows of a real PostgreSQL, also if Spark is killed."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headrace.records import Header, OutgoingRecord
from headrace.runtime.telemetry.audit_events import RangeEvent
from headrace_devkit.testing import HeadraceProcess, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import Response, send
from tests.integration.pipelines.test_pipelines import QUICK, gone
from tests.postgres_server import PostgresServer, postgres_server

EXAMPLE = Path(__file__).parents[3] / "packages" / "headrace-pipelines" / "examples" / "audit"
OTHER_NAMES = {"timestamp": "time", "offset": "first_offset", "group": "consumer_group"}
TOKENS = {"loader": "kafka:w", "reader": "kafka:r", "operator": "admin"}
PRINCIPALS = {name: {"token": f"${{env:{name}}}", "scopes": [scope]} for name, scope in TOKENS.items()}
LAST_MILLISECONDS = 253_402_300_799_999
"""The end of the year 9999."""
WHEN_WRITTEN = "the time at which the event was written"
ODD = 'odd "\0", \n\\u0000 €'
FOREIGN = {"id": "f", "serviceId": "f", "auditType": "FOREIGN", "auditStatus": "SUCCESS", "timestamp": 10**30}
LIMIT_SECONDS = 240.0


def column_of(field: str) -> str:
    """Return the column of a field."""
    return OTHER_NAMES.get(field, re.sub("[A-Z]", lambda letter: f"_{str(letter[0]).lower()}", field))


def row_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the row that an event should be."""
    time = event["timestamp"]
    return {
        **{column_of(field): value for field, value in event.items()},
        "time": WHEN_WRITTEN if time > LAST_MILLISECONDS else dt.datetime.fromtimestamp(time / 1000, dt.UTC),
    }


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        server.execute((EXAMPLE / "audit.sql").read_text())
        yield server


def columns_of(postgres: PostgresServer) -> list[str]:
    """Return the columns of the table, in their order."""
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'audit' ORDER BY ordinal_position"
    return [name for (name,) in postgres.execute(columns)]


def rows_of(postgres: PostgresServer) -> dict[str, dict[str, Any]]:
    """Return the rows by id, without their nulls."""
    names, rows = columns_of(postgres), postgres.execute("SELECT * FROM audit")
    found = [{n: v for n, v in zip(names, row, strict=True) if v is not None} for row in rows]
    return {row["id"]: row for row in found}


class AuditedProcess:
    """A Headrace whose audit is a topic, with one reactive consumer and the pipeline of the example."""

    def __init__(self, site: Scenario, process: HeadraceProcess, topics: Sequence[str]) -> None:
        """Name the topics: the one to write to, the one that is pushed, and the one of the audit."""
        self.site, self.process = site, process
        self.topic, self.pushed, self.audit = topics

    def ask(self, method: str, path: str, body: Any, name: str = "loader") -> Response:
        return send(method, self.process.url + path, body, {"Authorization": f"Bearer {name:->16}"})

    def status(self) -> Any:
        """Return the status of the pipeline, which goes on."""
        [status] = self.ask("GET", "/adm/pipelines", None, "operator").body["pipelines"]
        assert status["state"] != "failed", status
        return status

    def events(self) -> dict[str, dict[str, Any]]:
        """Return the events of the topic by id."""
        values = [json.loads(record.value or b"{}") for record in self.site.records(self.audit)]
        return {value["id"]: value for value in values if value.get("id")}

    def write_summaries(self, count: int) -> None:
        """Send requests, each of which has one event of two partitions."""
        records = [{"value": number, "partition": number % 2} for number in range(3)]
        for _ in range(count):
            assert self.ask("POST", f"/producers/{self.topic}", {"records": records}).status == 200

    def do_everything(self) -> None:
        """Do what has events of each kind: 9, and one of another program; and write what is not an event."""
        record = {"key": "k", "value": 1, "correlationId": ODD}
        place = {"topic": self.topic, "partition": 2, "offset": 2**62}
        reports = [{"record": place, "timestamp": at, "processed": True, "key": "k"} for at in (1, 2**62)]
        consumer = f"/adm/reactive-consumers/{self.pushed}"
        for path, body, name, status in (
            (f"/producers/{self.topic}", {"records": [record] * 2}, "loader", 200),
            (f"/producers/{self.topic}-missing", {"records": [record]}, "loader", 404),
            (f"/producers/{self.topic}", {"records": [record]}, "reader", 403),
            ("/consumers/active/audit", reports, "reader", 200),
            (f"{consumer}/pause", {"reason": "o'clock"}, "operator", 200),
            (f"{consumer}/resume", {}, "operator", 200),
        ):
            assert self.ask("POST", path, body, name).status == status
        self.write_summaries(1)
        headers: list[Header] = [("headrace.redrive.of", f"{self.pushed}:0:7".encode()), ("X-Traceability-Id", b"t")]
        self.site.write(self.pushed, OutgoingRecord(self.pushed, b"k", b"{}", headers))
        values = [json.dumps(value).encode() for value in (FOREIGN, {}, {"id": None, "count": 1})]
        self.site.write(self.audit, *(OutgoingRecord(self.audit, None, value) for value in values))


def test_every_field_of_an_event_is_read() -> None:
    """A new field needs a column."""
    schema = yaml.safe_load((EXAMPLE / "audit.yaml").read_text())["sources"]["events"]["schema"]
    read = re.findall(r"(?:^|, )(\w+) ", re.sub("<.*>", "", schema))
    assert sorted(read) == sorted(field.encode_name for field in msgspec.structs.fields(RangeEvent))
    table = re.findall(r'^  "?(\w+)"? ', (EXAMPLE / "audit.sql").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(map(column_of, read))


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(600)
def test_rows_equal_the_events_also_when_the_driver_is_killed(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], postgres: PostgresServer, tmp_path: Path
) -> None:
    """Of writes, failures, refusals, deliveries, reports and operations. Odd texts, times and values stop nothing."""
    topics = topic(3), topic(), f"{topic()}-audit"
    document = yaml.safe_load((EXAMPLE / "audit.yaml").read_text())
    document["sources"]["events"]["topic"], document["driver"] = topics[2], QUICK
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(document))
    more = {"audit": {"to": "topic", "topic": topics[2]}, "pipelines": [str(tmp_path / "audit.yaml")]}
    more["security"] = {"mode": "token", "principals": PRINCIPALS}
    env = postgres.environment | {name: f"{name:->16}" for name in TOKENS}
    audited = AuditedProcess(site, push(topics[1], more=more, env=env, wait=False), topics)
    audited.process.wait_ready(LIMIT_SECONDS)

    def wait_for_rows(count: int) -> None:
        def are_there() -> bool:
            return bool(audited.status()) and len(audited.events()) == count == len(rows_of(postgres))

        site.wait_until(are_there, f"{count} rows", LIMIT_SECONDS)

    audited.do_everything()
    wait_for_rows(10)
    killed = audited.status()["driverPid"]
    audited.write_summaries(100)
    os.kill(killed, signal.SIGKILL)
    audited.write_summaries(100)
    wait_for_rows(210)
    assert gone(killed)
    assert audited.process.terminate() == 0

    found, expected = rows_of(postgres), {identity: row_of(event) for identity, event in audited.events().items()}
    far = [found[identity] for identity, row in expected.items() if row["time"] == WHEN_WRITTEN]
    assert [abs(dt.datetime.now(dt.UTC) - row["time"]) < dt.timedelta(hours=1) for row in far] == [True, True]
    for row in far:
        row["time"] = WHEN_WRITTEN
    assert found.keys() == expected.keys()
    assert [(found[identity], row) for identity, row in expected.items() if found[identity] != row] == []
    kinds = Counter(row["audit_type"] for row in found.values())
    counts = {"ACCESS": 1, "ACTIVE_CONSUMER": 2, "CONTROL": 2, "PRODUCER": 203, "REACTIVE_CONSUMER": 1, "FOREIGN": 1}
    assert kinds == counts
    assert sum("ranges" in row for row in found.values()) == 201
    assert {name for row in found.values() for name in row} == {*columns_of(postgres)} - {"replay"}
