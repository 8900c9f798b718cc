"""Each feature with exactly the rights of `docs/security-rights.md`, and without each of them once."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AdminClient,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from headrace.devcluster.certificates import write_file
from headrace.devcluster.security import allowed
from headrace.testing import Answer, HeadraceProcess, RecordingBackend
from headrace.testing.scene import Scene
from headrace.testing.secured import SecuredCluster
from tests.active_client import Instance, send

PAGE = Path(__file__).parents[2] / "docs" / "security-rights.md"
KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
    "cluster": ResourceType.BROKER,
}
OWN_NAMES = re.compile(r"orders|tracking|weights|headrace-host|_headrace-(?:idempotency|control)|sidecar-audit")
LIMIT_SECONDS = 60.0


class Row(NamedTuple):
    """A right, as the page lists it."""

    operation: str
    kind: str
    name: str
    purpose: str

    @property
    def at_start(self) -> bool:
        return self.purpose.endswith("at start")

    def binding(self, user: str, key: str) -> AclBinding:
        operation = AclOperation[re.sub(r"(?<!^)(?=[A-Z])", "_", self.operation).upper()]
        return allowed(user, KINDS[self.kind], named(self.name, key) or "kafka-cluster", operation)

    def sentence(self, user: str, key: str) -> str:
        resource = f"{self.kind} {named(self.name, key)}".rstrip()
        return f"User:{user} has no right {self.operation} on {resource}"


def named(name: str, key: str) -> str:
    """Return the name that a feature uses for one of the page."""
    return OWN_NAMES.sub(rf"\g<0>-{key}", name)


def rows_of(title: str) -> list[Row]:
    """Return the rights of a section of the page."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (\w+) \| (topic|group|transactional id|cluster)(?: `(.+?)`)? \| (.+?) \|$", section, re.M)
    return [Row(*row) for row in found]


class World:
    """The secured cluster with one user, and a process of that user."""

    def __init__(self, secured: SecuredCluster, key: str, title: str, folder: Path, headrace: Any, backend: Any):
        self.secured, self.key, self.rows, self.folder = secured, key, rows_of(title), folder
        self.headrace, self.backend = headrace, backend
        self.user = f"user-{key}"
        self.site = Scene(secured.cluster.bootstrap_servers, folder)
        self.process: HeadraceProcess | None = None
        self._admin = AdminClient({"bootstrap.servers": secured.cluster.bootstrap_servers})
        password = secrets.token_urlsafe(16)
        write_file(secured.security.folder / f"{self.user}.password", password.encode(), 0o600)
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        change = UserScramCredentialUpsertion(self.user, scram, password.encode())
        for future in self._admin.alter_user_scram_credentials([change]).values():
            future.result(LIMIT_SECONDS)
        for row in self.rows:
            if row.kind == "topic" and row.operation != "Create" and not row.name.startswith("_headrace-redriven"):
                compact = {"cleanup.policy": "compact"} if row.name.startswith("_headrace") else {}
                self.secured.cluster.create_topic(self(row.name), 1, compact)
        self.give(*self.rows)

    def __call__(self, name: str) -> str:
        return named(name, self.key)

    def give(self, *rows: Row) -> None:
        """Give the user rights."""
        for future in self._admin.create_acls([row.binding(self.user, self.key) for row in rows]).values():
            future.result(LIMIT_SECONDS)

    def take(self, row: Row) -> None:
        """Take a right from the user."""
        one = row.binding(self.user, self.key)
        pattern = (one.restype, one.name, one.resource_pattern_type, one.principal, one.host)
        filters = [AclBindingFilter(*pattern, one.operation, one.permission_type)]
        for future in self._admin.delete_acls(filters).values():
            assert len(future.result(LIMIT_SECONDS)) == 1

    def config(self, **more: Any) -> dict[str, Any]:
        """Return the user's headrace.yaml."""
        kafka = {**self.secured.login("SCRAM-SHA-512", self.user), "create_topics": False}
        control = {"topic": self("_headrace-control")}
        return {"kafka": {**kafka, **more.pop("kafka", {})}, "control": control, **more}

    def run(self, **more: Any) -> None:
        """Start the process."""
        self.process = self.headrace(self.config(**more))

    @property
    def url(self) -> str:
        assert self.process
        return self.process.url

    def texts(self, answer: str) -> str:
        """Return everything that the process reports now."""
        assert self.process
        assert self.process.exit_code is None, self.process.output
        try:
            ready = json.dumps(send("GET", f"{self.process.url}/health/readiness").body)
        except OSError:  # it is starting
            ready = ""
        return f"{answer}\n{ready}\n{self.process.output}"


class Feature:
    """Uses a feature again and again: `trigger` begins the use of a number, `done` returns whether it has worked."""

    title = ""
    more: Mapping[str, Any] = {}
    repeats = True
    """Whether a use that was refused is repeated by its caller; otherwise the process must finish it by itself."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.answer = ""

    def start(self) -> None:
        self.world.run(**self.more)

    def restart(self) -> None:
        """Start again, without waiting for readiness."""
        assert self.world.process
        self.world.process.terminate()
        self.world.process.start()

    def trigger(self, number: int) -> None:
        raise NotImplementedError

    def done(self, number: int) -> bool:
        raise NotImplementedError

    def texts(self) -> str:
        return self.world.texts(self.answer)


class Posted(Feature):
    """A request that is answered 200."""

    status = 0

    def headers(self, number: int) -> dict[str, str]:
        return {}

    def body(self, number: int) -> Any:
        return {"records": [{"value": number}]}

    def path(self) -> str:
        return f"/producers/{self.world('orders')}"

    def trigger(self, number: int) -> None:
        self.status = 0
        try:
            answer = send("POST", self.world.url + self.path(), self.body(number), self.headers(number))
        except OSError:  # it is starting
            return
        self.status, self.answer = answer.status, json.dumps(answer.body)
        if "has no right" in self.answer:
            assert answer.status == 403

    def done(self, number: int) -> bool:
        return self.status == 200


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


class Written(Feature):
    """Records that the process reads by itself, and must end somewhere."""

    repeats = False

    def trigger(self, number: int) -> None:
        self.world.site.write_json(self.world("orders"), {"n": number})

    def arrived(self, topic: str, number: int) -> bool:
        return any(json.loads(record.value or b"{}").get("n") == number for record in self.world.site.records(topic))


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
LONG: tuple[type[Feature], ...] = (Keyed, Function, Control, Audit, Doctor)


@pytest.fixture
def world(
    kafka_secured: SecuredCluster, tmp_path: Path, headrace: Callable[..., Any], backend: RecordingBackend
) -> Iterator[Callable[[type[Feature]], World]]:
    """Return the world of a feature."""

    def make(feature: type[Feature]) -> World:
        return World(kafka_secured, feature.__name__.lower(), feature.title, tmp_path, headrace, backend)

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
    known = {row.sentence(scene.user, scene.key) for row in (*scene.rows, *rows_of("Active consumers"))}
    named_rights = set(re.findall(rf"User:{scene.user} has no right [^:;\"(]+?(?=[:;])", feature.texts()))
    others = {one for one in named_rights - known if "DescribeConfigs" not in one}
    assert others == set()
