"""Each feature with exactly the rights of `docs/security-rights.md`, and without each of them once."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import TopicNotFound
from headrace.records import TopicPartition
from headrace_devkit.testing import PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import Instance, send
from tests.function_calls import function_file
from tests.least_rights import Feature, Posted, RightsScenario, Written, assert_named, rows_of
from tests.least_rights_jobs import Redrive, Registration, Replay


class Produce(Posted):
    titles = ("Produce",)


class Keyed(Posted):
    titles = ("Produce with an idempotency key",)

    def start(self) -> None:
        names = {
            "transactions": {"id": self.scenario("headrace-host")},
            "idempotency": {"topic": self.scenario("_headrace-idempotency")},
        }
        self.scenario.run(producer=names)

    def headers(self, number: int) -> dict[str, str]:
        return {"Idempotency-Key": f"key-{number}-{secrets.token_hex(4)}"}


class Transaction(Keyed):
    titles = ("Transactions",)

    def headers(self, number: int) -> dict[str, str]:
        return {}

    def path(self) -> str:
        return "/transactions"

    def body(self, number: int) -> Any:
        return {"topics": [{"topic": self.scenario("orders"), "records": [{"value": number}]}]}


class Push(Written):
    titles = ("Push to a backend",)

    def start(self) -> None:
        self.scenario.backend.response = PlannedResponse(fails=lambda entry: True)
        self.scenario.run(reactive_consumers={"push": self.scenario.consumer(retry={"attempts": 1, "topics": [1]})})

    def done(self, number: int) -> bool:
        return self.arrived(self.scenario("orders.dlq"), number)


class CreatedTopics(Push):
    """A process that finds no dead letter topic when it starts, in each use."""

    titles = ("Topics that Headrace creates",)

    def start(self) -> None:
        self.scenario.give(*rows_of("Push to a backend"))
        self.scenario.create_topic("_headrace-control")
        self.scenario.backend.response = PlannedResponse(fails=lambda entry: True)
        consumer = self.scenario.consumer(retry={"attempts": 1})
        self.scenario.run(wait=False, kafka={"create_topics": True}, reactive_consumers={"push": consumer})

    def trigger(self, number: int) -> None:
        assert self.scenario.process
        self.scenario.process.terminate()
        self.scenario.delete_topic("orders.dlq")
        self.scenario.process.start()
        super().trigger(number)

    def done(self, number: int) -> bool:
        with contextlib.suppress(TopicNotFound):
            return super().done(number)
        return False


class Function(Written):
    titles = ("Functions",)

    def start(self) -> None:
        code = "def handler(context, event):\n    if event.body['n'] % 2:\n        raise ValueError('odd')\n"
        names = {"topics": [self.scenario("orders")], "consumerGroup": self.scenario("tracking"), "valueFormat": "json"}
        attributes = {**names, "outputTopic": self.scenario("weights"), "retry": {"attempts": 1}}
        trigger = {"kind": "kafka-cluster", "numWorkers": 1, "attributes": attributes}
        file = function_file(self.scenario.folder, f"{code}    return event.body\n", {"in": trigger})
        self.scenario.run(functions=[file])

    def trigger(self, number: int) -> None:
        self.scenario.site.write_json(self.scenario("orders"), {"n": 2 * number}, {"n": 2 * number + 1})

    def done(self, number: int) -> bool:
        ended = self.arrived(self.scenario("weights"), 2 * number)
        return ended and self.arrived(self.scenario("orders.dlq"), 2 * number + 1)


class Tables(Written):
    titles = ("Tables",)

    def start(self) -> None:
        table = {"topic": self.scenario("orders"), "kind": "log", "schema": "n BIGINT"}
        self.scenario.run(tables={"numbers": table}, state_dir=str(self.scenario.folder / "state"))

    def done(self, number: int) -> bool:
        statement = {"sql": "SELECT n FROM numbers WHERE n = ?", "params": [number]}
        response = send("POST", f"{self.scenario.url}/query", statement)
        self.response = json.dumps(response.body)
        return response.status == 200 and response.body["rows"] == [{"n": number}]


class Active(Feature):
    titles = ("Active consumers",)
    repeats = False

    def start(self) -> None:
        self.scenario.run()
        self.instance = Instance(
            self.scenario.url, self.scenario("tracking"), valueFormat="json", autoCommitEnable="false"
        )
        self.instance.ok("POST", "/subscriptions", {"topics": [self.scenario("orders")]})
        self.read: set[int] = set()
        self.committed = 0

    def trigger(self, number: int) -> None:
        self.scenario.site.write_json(self.scenario("orders"), {"n": number})

    def done(self, number: int) -> bool:
        response = self.instance("GET", "/records?timeout=500")
        assert_named(response)
        self.response = json.dumps(response.body)
        if response.status == 200:
            self.read |= {record["value"]["n"] for record in response.body}
        committed = self.instance("POST", "/offsets")
        assert_named(committed)
        self.response += json.dumps(committed.body)
        return number in self.read and committed.status in (200, 204)


class Control(Posted):
    titles = ("Control of consumers",)

    def start(self) -> None:
        self.scenario.give(*rows_of("Active consumers"))
        self.scenario.create_topic("orders")
        self.scenario.run(reactive_consumers={"push": self.scenario.consumer(dead_letter={"enabled": False})})

    def path(self) -> str:
        return "/adm/reactive-consumers/push/pause"

    def body(self, number: int) -> Any:
        return {"reason": f"use {number}, {secrets.token_hex(4)}"}


class Audit(Posted):
    titles = ("Audit to a topic",)
    known = (-1, 0)
    """The present use, and how many events there were before it."""

    def start(self) -> None:
        self.scenario.run(audit={"to": "topic", "topic": self.scenario("sidecar-audit")})

    def trigger(self, number: int) -> None:
        if self.known[0] != number:
            self.known = number, len(self.scenario.site.records(self.scenario("sidecar-audit")))
        super().trigger(number)

    def done(self, number: int) -> bool:
        return self.status == 200 and len(self.scenario.site.records(self.scenario("sidecar-audit"))) > self.known[1]


class Doctor(Feature):
    titles = ("Doctor",)

    def start(self) -> None:
        self.file = self.scenario.file(
            reactive_consumers={"push": self.scenario.consumer(dead_letter={"enabled": False})}
        )

    def trigger(self, number: int) -> None:
        self.response = self.scenario.site.cli("doctor", "-c", str(self.file), "--output", "json", code=1).stdout

    def done(self, number: int) -> bool:
        return "has no right" not in self.response and "retention" in self.response

    def texts(self) -> str:
        return self.response


class Pipeline(Written):
    titles = ("Pipelines", "Pipelines with exactly-once sinks")
    limit_seconds = 240.0

    def start(self) -> None:
        name, source = self.scenario("headrace.scale").removeprefix("headrace."), self.scenario("orders")
        flow = {"sql": "SELECT n FROM a", "sink": {"topic": self.scenario("weights"), "delivery": "exactly_once"}}
        spec = {"name": name, "sources": {"a": {"topic": source, "schema": "n INT"}}, "flows": {"copy": flow}}
        (self.scenario.folder / "pipeline.yaml").write_text(yaml.safe_dump(spec))
        more = {
            "pipelines": [str(self.scenario.folder / "pipeline.yaml")],
            "state_dir": str(self.scenario.folder / "state"),
        }
        self.scenario.run(**more)
        self.group = self.scenario("headrace.scale.copy")

    def done(self, number: int) -> bool:
        shown = self.scenario.site.committed(self.group).get(TopicPartition(self.scenario("orders"), 0)) == number + 1
        return shown and self.arrived(self.scenario("weights"), number)

    def texts(self) -> str:
        """Return the status only: the log must have the same, but it keeps what was mended."""
        assert self.scenario.process
        (status,) = (
            one["reason"]
            for name, one in send("GET", f"{self.scenario.url}/health/readiness").body["services"].items()
            if name.startswith("pipeline ")
        )
        missing = re.findall(r"(User:\S+ has no right [^:;]+): allow it \(kafka-acls\.sh --add", status)
        return "; ".join(one for one in missing if one in self.scenario.process.output)


FEATURES: tuple[type[Feature], ...] = (Produce, Active)
LONG: tuple[type[Feature], ...] = (
    Keyed,
    Transaction,
    Push,
    Function,
    CreatedTopics,
    Control,
    Audit,
    Doctor,
    Replay,
    Redrive,
    Registration,
    Tables,
    Pipeline,
)


@pytest.fixture
def scenario(
    kafka_secured: SecuredCluster, tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend
) -> Iterator[Callable[[type[Feature]], RightsScenario]]:
    """Return the scenario of a feature."""

    def make(feature: type[Feature]) -> RightsScenario:
        key = f"{feature.__name__.lower()}-{secrets.token_hex(2)}"  # a second try finds nothing of the first
        return RightsScenario(kafka_secured, key, rows_of(*feature.titles), tmp_path, headrace, backend)

    return make


def name_of(kind: type[Feature]) -> str:
    """Return the name of a test."""
    return kind.__name__.lower()


def wait(feature: Feature, number: int, condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; a caller repeats its use meanwhile, at a bounded pace."""
    end = time.monotonic() + feature.limit_seconds
    while not condition():
        assert time.monotonic() < end, f"{what} is missing in {feature.texts()[-6000:]}"
        time.sleep(0.3)
        if feature.repeats:
            feature.trigger(number)


@pytest.mark.parametrize(
    "kind", [*FEATURES, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)], ids=name_of
)
def test_each_right_is_enough_and_needed(
    kind: type[Feature], scenario: Callable[[type[Feature]], RightsScenario]
) -> None:
    """All rights are enough; without one of them the sentence names it, and with it again nothing is lost."""
    feature = kind(used := scenario(kind))
    assert used.rows
    feature.start()
    feature.trigger(0)
    wait(feature, 0, lambda: feature.done(0), "the first use")
    for number, row in enumerate(used.rows, 1):
        sentence = row.sentence(used.user, used.key)
        assert sentence not in feature.texts()
        used.take(row)
        if row.at_start:
            feature.restart()
        feature.trigger(number)
        wait(feature, number, lambda words=sentence: words in feature.texts(), f"{row}: {sentence}")
        used.give(row)
        wait(feature, number, lambda number=number: feature.done(number), f"use {number} after {row} was given back")
    known = tuple(row.sentence(used.user, used.key) for row in (*used.rows, *rows_of("Active consumers")))
    named_rights = set(re.findall(rf"User:{used.user} has no right [^:;\"(]+?(?=[:;])", feature.texts()))
    others = {one for one in named_rights if not one.startswith(known) and "DescribeConfigs" not in one}
    assert others == set()
