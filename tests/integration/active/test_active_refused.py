"""A read of an active consumer that Kafka refuses answers with the reason, and finds records once that is mended."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_devkit.testing import RecordingBackend, StartHeadrace
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import Instance, Response
from tests.least_rights import RightsScenario, Row, rows_of

TOPIC, GROUP = "orders", "tracking"


class Reader:
    """An instance of a user with the rights of the page, of which one may be missing."""

    def __init__(self, scenario: RightsScenario) -> None:
        self.scenario, self.topic = scenario, scenario(TOPIC)
        self.rights = {row.kind: row for row in scenario.rows}
        self.written = 0

    def open(self, how: str = "subscriptions") -> Instance:
        """Return an instance that reads the topic as a member, or as it was assigned."""
        instance = Instance(self.scenario.url, self.scenario(GROUP), valueFormat="json", requestWaitMs=1000)
        partitions = {"partitions": [{"topic": self.topic, "partition": 0}]}
        instance.ok("POST", f"/{how}", {"topics": [self.topic]} if how == "subscriptions" else partitions)
        return instance

    def answer(self, instance: Instance, status: int) -> Response:
        """Read until a read is answered with a status; before that there may be empty ones."""
        seen: list[Response] = []

        def read() -> bool:
            seen.append(instance("GET", "/records"))
            assert seen[-1].status in (200, status), seen[-1]
            return seen[-1].status == status

        self.scenario.site.wait_until(read, f"a response {status}")
        return seen[-1]

    def refused(self, instance: Instance, row: Row) -> None:
        """Wait until a read names the missing right."""
        found = self.answer(instance, 403)
        assert found.code == "ERR40015"
        assert row.sentence(self.scenario.user, self.scenario.key) in found.body["description"]

    def receives(self, *instances: Instance) -> None:
        """Wait until one of the instances has a new record; no other reports a problem."""
        self.written += 1
        self.scenario.site.write_json(self.topic, {"n": self.written})
        got: list[int] = []

        def read() -> bool:
            responses = [instance("GET", "/records") for instance in instances]
            for response in responses:
                got.extend(record["value"]["n"] for record in response.body if response.status == 200)
            return self.written in got and {response.status for response in responses} == {200}

        self.scenario.site.wait_until(read, f"record {self.written}")
        for instance in instances:
            instance.ok("POST", "/offsets")


@pytest.fixture
def reader(
    kafka_secured: SecuredCluster, tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend
) -> Iterator[Reader]:
    """A user with every right that an active consumer needs."""
    yield Reader(
        RightsScenario(
            kafka_secured, f"refused-{secrets.token_hex(3)}", rows_of("Active consumers"), tmp_path, headrace, backend
        )
    )


@pytest.mark.parametrize("how", ["subscriptions", pytest.param("assignments", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["group", "topic"])
def test_a_missing_right_is_answered_until_it_is_given(reader: Reader, kind: str, how: str) -> None:
    """At the start, and later while partitions are assigned; the same instance reads on."""
    row = reader.rights[kind]
    reader.scenario.take(row)
    reader.scenario.run()
    instance = reader.open(how)
    reader.refused(instance, row)
    reader.scenario.give(row)
    reader.receives(instance)
    if (kind, how) != ("group", "assignments"):  # an assignment needs that right again with the next commit only
        reader.scenario.take(row)
        reader.refused(instance, row)
        reader.scenario.give(row)
        reader.receives(instance)


@pytest.mark.parametrize("kind", [pytest.param("group", marks=pytest.mark.long), "topic"])
def test_an_instance_without_a_partition_forgets_the_refusal_too(reader: Reader, kind: str) -> None:
    """The topic has one partition, so one of two instances gets none."""
    row = reader.rights[kind]
    reader.scenario.take(row)
    reader.scenario.run()
    instances = reader.open(), reader.open()
    for instance in instances:
        reader.refused(instance, row)
    reader.scenario.give(row)
    reader.receives(*instances)


def test_a_refused_login_is_answered_until_it_is_accepted(reader: Reader) -> None:
    """By a read, and by the first event of a stream, which then ends."""
    scenario = reader.scenario
    scenario.set_password("another-password")
    scenario.process = scenario.headrace(scenario.config(), wait=False)
    scenario.site.wait_until(lambda: "is wrong for SCRAM-SHA-512" in scenario.texts(""), "the refusal")
    instance = reader.open()
    found = reader.answer(instance, 503)
    assert found.code == "ERR40012"
    assert f"user {scenario.user} or its password is wrong for SCRAM-SHA-512: correct" in found.body["description"]
    stream = instance.open("application/x-ndjson", "")
    assert "is wrong for SCRAM-SHA-512" in stream.until(lambda data: b"ERR40012" in data).decode()
    stream.cut()
    scenario.set_password(scenario.password)
    reader.receives(instance)
    assert json.dumps(found.body).count(scenario.password) == 0
