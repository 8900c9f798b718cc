"""What is judged of a cluster: everything that a configuration reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.admin.health.examination import by_cluster
from headrace.app.app import App
from headrace.app.topic_requirements import topic_requirements
from headrace.config.whole_file import WholeFile
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.errors import FunctionInvalid
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from headrace.functions.triggers.trigger import Trigger
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts
from headrace_devkit.testing import ManualClock


def test_retry_topics_are_judged_as_what_their_group_reads() -> None:
    """The group's own offset passes a record that waits there, so nothing else holds it."""
    reactive = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost/"}}
    consumers = {"a": {**reactive, "retry": {"topics": [1, 60]}}, "b": {**reactive, "group": "h"}}
    config = WholeFile.model_validate({"reactive_consumers": consumers})
    read = {each.group: ([*each.topics], [*each.retry_topics]) for _, each in topic_requirements(config)}
    assert read == {"g": (["t"], ["g.retry.1s", "g.retry.60s"]), "h": (["t"], [])}


def write_functions(folder: Path, *attributes: dict[str, object]) -> dict[str, object]:
    """Write a function file per trigger; return the part of the configuration that names them."""
    files = []
    for number, more in enumerate(attributes):
        file = folder / f"f{number}.yaml"
        file.touch(0o600)
        own = {"topics": ["t"], "consumerGroup": f"g{number}", **more}
        triggers = {"k": {"kind": "kafka", "attributes": own}}
        document = {"metadata": {"name": f"f{number}"}, "spec": {"handler": "m:h", "triggers": triggers}}
        file.write_text(yaml.safe_dump(document))
        files.append(str(file))
    return {"functions": files}


async def test_triggers_with_equal_brokers_and_login_share_the_clients_of_a_cluster(tmp_path: Path) -> None:
    """Another password, or another file of the same password, is another login; files may change alone."""
    passwords = ["p", "p", "q", "${file:a}", "${file:b}", "${file:a}"]
    for name in ("a", "b"):
        (tmp_path / name).write_text("p")
    logins = [{"enable": True, "user": "u", "password": password} for password in passwords]
    own: list[dict[str, object]] = [{"brokers": ["other:9092"], "sasl": sasl} for sasl in logins]
    config = WholeFile.model_validate(write_functions(tmp_path, {}, {"brokers": ["localhost:9092"]}, *own))
    app = App(config, ManualClock())
    consumers = NeededParts(app.process.parts).of(ConsumersParts).consumers
    admins = [consumer.admin for consumer in consumers.consumers]
    assert [admins.index(admin) for admin in admins] == [0, 0, 2, 2, 4, 5, 6, 5]
    names = [service.name for service in app.process.supervisor.services if service.name.startswith("kafka ")]
    assert names == ["kafka other:9092", *(f"kafka other:9092 as f{number}.k" for number in (4, 5, 6))]
    required = by_cluster(config.kafka, topic_requirements(config))
    groups = [[each.group for each in found] for _, found in required]
    assert groups == [["g0", "g1"], ["g2", "g3", "g5", "g6", "g7"], ["g4"]]
    third_security = required[2][0].security
    assert third_security.sasl
    assert third_security.sasl.password.get_secret_value() == "q"


async def test_a_kind_of_trigger_is_served_by_what_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that says nothing is an error: its function would start, and none of its events would be delivered."""
    config = WholeFile.model_validate(write_functions(tmp_path, {}))
    own = Service("own")
    monkeypatch.setattr(KafkaTrigger, "serve", lambda self, parts: [own])
    assert own in App(config, ManualClock()).process.supervisor.services
    monkeypatch.setattr(KafkaTrigger, "serve", Trigger.serve)
    with pytest.raises(FunctionInvalid, match="trigger k: no service is made for triggers of kind kafka"):
        App(config, ManualClock())


async def test_how_often_offsets_are_committed_is_a_property_of_each_consumer(tmp_path: Path) -> None:
    """Without it push commits every 0.2 s, and a function every second."""
    often = {"consumer": {"properties": {"auto.commit.interval.ms": 50}}}
    reactive = {"topics": ["t"], "backend": {"url": "http://localhost/"}}
    consumers = {"a": {**reactive, "group": "a"}, "b": {**reactive, "group": "b", **often}}
    functions = write_functions(tmp_path, {}, dict(often))
    app = App(WholeFile.model_validate({**functions, "reactive_consumers": consumers}), ManualClock())
    found = NeededParts(app.process.parts).of(ConsumersParts).consumers.consumers
    assert {one.group: one.pump.hooks.commits.most_seconds for one in found} == {
        "a": 0.2,
        "b": 0.05,
        "g0": 1,
        "g1": 0.05,
    }
