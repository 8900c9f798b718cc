"""Each feature with exactly the rights of `docs/security-rights.md`, and without each of them once."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.testing import Answer, RecordingBackend
from headrace.testing.secured import SecuredCluster
from tests.active_client import Instance
from tests.least_rights import LIMIT_SECONDS, Feature, Posted, World, Written, rows_of
from tests.least_rights_jobs import Redrive, Registration, Replay


class Produce(Posted):
    title = "Produce"


class Keyed(Posted):
    title = "Produce with an idempotency key"

    def start(self) -> None:
        names = {
            "transactions": {"id": self.world("headrace-host"), "producers": 1},
            "idempotency": {"topic": self.world("_headrace-idempotency")},
        }
        self.world.run(producer=names)

    def headers(self, number: int) -> dict[str, str]:
        return {"Idempotency-Key": f"key-{number}-{secrets.token_hex(4)}"}


class Transaction(Keyed):
    title = "Transactions"

    def headers(self, number: int) -> dict[str, str]:
        return {}

    def path(self) -> str:
        return "/transactions"

    def body(self, number: int) -> Any:
        return {"topics": [{"topic": self.world("orders"), "records": [{"value": number}]}]}


class Push(Written):
    title = "Push to a backend"

    def start(self) -> None:
        self.world.backend.answer = Answer(fails=lambda entry: True)
        consumer = {
            "topics": [self.world("orders")],
            "group": self.world("tracking"),
            "value_format": "json",
            "retry": {"attempts": 1, "tiers": [1]},
            "backend": {"url": self.world.backend.url},
        }
        self.world.run(reactive_consumers={"push": consumer})

    def done(self, number: int) -> bool:
        return self.arrived(self.world("orders.dlq"), number)


class Function(Written):
    title = "Functions"

    def start(self) -> None:
        code = "def handler(context, event):\n    if event.body['n'] % 2:\n        raise ValueError('odd')\n"
        (self.world.folder / "work.py").write_text(code + "    return event.body\n")
        names = {"topics": [self.world("orders")], "consumerGroup": self.world("tracking"), "valueFormat": "json"}
        attributes = {**names, "outputTopic": self.world("weights"), "attempts": 1}
        trigger = {"kind": "kafka-cluster", "numWorkers": 1, "attributes": attributes}
        spec = {"handler": "work:handler", "triggers": {"in": trigger}}
        file = self.world.folder / "function.yaml"
        file.write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": spec}))
        self.world.run(functions=[str(file)])

    def trigger(self, number: int) -> None:
        self.world.site.write_json(self.world("orders"), {"n": 2 * number}, {"n": 2 * number + 1})

    def done(self, number: int) -> bool:
        ended = self.arrived(self.world("weights"), 2 * number)
        return ended and self.arrived(self.world("orders.dlq"), 2 * number + 1)


class Active(Feature):
    title = "Active consumers"
    repeats = False

    def start(self) -> None:
        self.world.run()
        self.instance = Instance(self.world.url, self.world("tracking"), valueFormat="json", autoCommitEnable="false")
        self.instance.ok("POST", "/subscriptions", {"topics": [self.world("orders")]})
        self.read: set[int] = set()
        self.committed = 0

    def trigger(self, number: int) -> None:
        self.world.site.write_json(self.world("orders"), {"n": number})

    def done(self, number: int) -> bool:
        answer = self.instance("GET", "/records?timeout=500")
        self.answer = json.dumps(answer.body)
        if answer.status == 200:
            self.read |= {record["value"]["n"] for record in answer.body}
        committed = self.instance("POST", "/offsets")
        self.answer += json.dumps(committed.body)
        return number in self.read and committed.status in (200, 204)


class Control(Posted):
    title = "Control of consumers"

    def start(self) -> None:
        consumer = {
            "topics": [self.world("orders")],
            "group": self.world("tracking"),
            "dead_letter": {"enabled": False},
            "backend": {"url": self.world.backend.url},
        }
        self.world.give(*rows_of("Active consumers"))
        self.world.secured.cluster.create_topic(self.world("orders"), 1, {})
        self.world.run(reactive_consumers={"push": consumer})

    def path(self) -> str:
        return "/adm/reactive-consumers/push/pause"

    def body(self, number: int) -> Any:
        return {"reason": f"use {number}, {secrets.token_hex(4)}"}


class Audit(Posted):
    title = "Audit to a topic"
    known = (-1, 0)
    """The present use, and how many notes there were before it."""

    def start(self) -> None:
        self.world.run(audit={"to": "topic", "topic": self.world("sidecar-audit")})

    def trigger(self, number: int) -> None:
        if self.known[0] != number:
            self.known = number, len(self.world.site.records(self.world("sidecar-audit")))
        super().trigger(number)

    def done(self, number: int) -> bool:
        return self.status == 200 and len(self.world.site.records(self.world("sidecar-audit"))) > self.known[1]


class Doctor(Feature):
    title = "Doctor"

    def start(self) -> None:
        consumer = {
            "topics": [self.world("orders")],
            "group": self.world("tracking"),
            "dead_letter": {"enabled": False},
            "backend": {"url": self.world.backend.url},
        }
        self.file = self.world.folder / "doctor.yaml"
        self.file.write_text(yaml.safe_dump(self.world.config(reactive_consumers={"push": consumer})))
        self.file.chmod(0o600)

    def trigger(self, number: int) -> None:
        self.answer = self.world.site.cli("doctor", "-c", str(self.file), "--output", "json", code=1).stdout

    def done(self, number: int) -> bool:
        return "has no right" not in self.answer and "retention" in self.answer

    def texts(self) -> str:
        return self.answer


FEATURES: tuple[type[Feature], ...] = (Produce, Transaction, Push, Active)
LONG: tuple[type[Feature], ...] = (Keyed, Function, Control, Audit, Doctor, Replay, Redrive, Registration)


@pytest.fixture
def world(
    kafka_secured: SecuredCluster, tmp_path: Path, headrace: Callable[..., Any], backend: RecordingBackend
) -> Iterator[Callable[[type[Feature]], World]]:
    """Return the world of a feature."""

    def make(feature: type[Feature]) -> World:
        key = f"{feature.__name__.lower()}-{secrets.token_hex(2)}"  # a second try finds nothing of the first
        return World(kafka_secured, key, feature.title, tmp_path, headrace, backend)

    return make


def name_of(kind: type[Feature]) -> str:
    """Return the name of a test."""
    return kind.__name__.lower()


def wait(feature: Feature, number: int, condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; a caller repeats its use meanwhile, at a bounded pace."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} is missing in {feature.texts()[-6000:]}"
        time.sleep(0.3)
        if feature.repeats:
            feature.trigger(number)


@pytest.mark.parametrize(
    "kind", [*FEATURES, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)], ids=name_of
)
def test_each_right_is_enough_and_needed(kind: type[Feature], world: Callable[[type[Feature]], World]) -> None:
    """All rights are enough; without one of them the sentence names it, and with it again nothing is lost."""
    feature = kind(scene := world(kind))
    assert scene.rows
    feature.start()
    feature.trigger(0)
    wait(feature, 0, lambda: feature.done(0), "the first use")
    for number, row in enumerate(scene.rows, 1):
        sentence = row.sentence(scene.user, scene.key)
        assert sentence not in feature.texts()
        scene.take(row)
        if row.at_start:
            feature.restart()
        feature.trigger(number)
        wait(feature, number, lambda words=sentence: words in feature.texts(), f"{row}: {sentence}")
        scene.give(row)
        wait(feature, number, lambda number=number: feature.done(number), f"use {number} after {row} was given back")
    known = tuple(row.sentence(scene.user, scene.key) for row in (*scene.rows, *rows_of("Active consumers")))
    named_rights = set(re.findall(rf"User:{scene.user} has no right [^:;\"(]+?(?=[:;])", feature.texts()))
    others = {one for one in named_rights if not one.startswith(known) and "DescribeConfigs" not in one}
    assert others == set()
