"""Every setting of a trigger: Nuclio's documented examples, precedence, defaults, and what each becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.kafka import KafkaConfig
from headrace.errors import FunctionInvalid
from headrace.functions.function_keys import ANNOTATED
from headrace.functions.load import load_function
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from yaml_table import table

ANNOTATION_OF = {key.key: key.annotation for key in ANNOTATED if key.is_read}
LEGACY = {"waitExplicitAckDuringRebalanceTimeout": "nuclio.io/wait-explicit-ack-during-rebalance-timeout"}
OF_TRIGGER = ("explicitAckMode", "waitExplicitAckDuringRebalanceTimeout")
VALUES: dict[str, tuple[str, str]] = table(__file__, "values")
"""Two values of each key; those that are not here are durations."""


def load(folder: Path, spec: dict[str, Any] | str = "", annotations: Any = None, **attributes: Any) -> FunctionSpec:
    """Load a file; `trigger` among the attributes is what is written in the trigger itself."""
    if isinstance(spec, str):
        spec = yaml.safe_load(spec) or {}
    own = attributes.pop("trigger", {})
    trigger = {"kind": "kafka", "attributes": {"topics": ["t"], "consumerGroup": "g", **attributes}, **own}
    tree = {
        "metadata": {"annotations": annotations or {}},
        "spec": {"handler": "main:handler", "triggers": {"k": trigger}, **spec},
    }
    (folder / "function.yaml").write_text(json.dumps(tree, indent="\t"))
    (folder / "function.yaml").chmod(0o600)
    return load_function(folder)


def only(spec: FunctionSpec) -> KafkaTrigger:
    [trigger] = spec.kafka_triggers
    return trigger


def values_of(key: str) -> tuple[str, str]:
    return VALUES.get(key, ("1500ms", "2500ms"))


def written(key: str, value: str) -> dict[str, Any]:
    """Return how a key is written: in the trigger or among its attributes, numbers without quotes."""
    found: Any = int(value) if value.isdigit() else value
    return {"trigger": {key: found}} if key in OF_TRIGGER else {key: found}


@pytest.mark.parametrize("key", ANNOTATION_OF)
def test_an_annotation_means_its_attribute_and_the_attribute_wins(tmp_path: Path, key: str) -> None:
    """For every key that has an annotation, also where Nuclio's annotation wins."""
    first, second = values_of(key)
    name = LEGACY.get(key, f"nuclio.io/kafka-{ANNOTATION_OF[key]}")
    more = {} if key == "workerAllocationMode" else {"workerAllocationMode": "static"}
    alone = only(load(tmp_path, **written(key, first), **more))
    assert only(load(tmp_path, annotations={name: first}, **more)) == alone
    assert alone != only(load(tmp_path, **more)), "the value is kept"
    both = only(load(tmp_path, annotations={name: second}, **written(key, first), **more))
    assert both == alone
    assert only(load(tmp_path, annotations={name: second}, **more)) != alone


def test_older_names_count(tmp_path: Path) -> None:
    """The earlier document has `topic`; the older annotation of the window wins, and its attribute wins over both."""
    spec = {"triggers": {"k": {"kind": "kafka", "attributes": {"topic": "orders", "consumerGroup": "g"}}}}
    assert only(load(tmp_path, spec)).topics == ["orders"]
    annotations = {"custom.nuclio.io/kafka-window-size": "3", "nuclio.io/kafka-window-size": "4"}
    assert only(load(tmp_path, annotations=annotations)).kafka.ack_window_size == 3
    assert only(load(tmp_path, annotations=annotations, ackWindowSize=5)).kafka.ack_window_size == 5


PROPERTIES: dict[str, tuple[Any, dict[str, Any]]] = table(__file__, "properties")


@pytest.mark.parametrize("key", PROPERTIES)
def test_a_setting_becomes_a_property_of_the_client(tmp_path: Path, key: str) -> None:
    """The names are librdkafka's."""
    value, properties = PROPERTIES[key]
    found = only(load(tmp_path, **{key: value})).kafka.member.client_properties({})
    assert {name: found[name] for name in properties} == properties


def test_settings_of_connections_are_the_triggers_own(tmp_path: Path) -> None:
    """Without them the trigger uses the configuration of the file as it is."""
    kafka = KafkaConfig(properties={"client.rack": "r"})
    assert only(load(tmp_path)).kafka.cluster(kafka) is kafka
    own = load(tmp_path, netDialTimeout="500ms", netKeepAliveInterval="90s", adminTimeout="4s")
    found = only(own).kafka.cluster(kafka)
    assert found.properties == {
        "client.rack": "r",
        "socket.connection.setup.timeout.ms": 1000,
        "socket.keepalive.enable": True,
    }
    assert (found.request_timeout_seconds, found.bootstrap_servers) == (4, kafka.bootstrap_servers)


def test_the_least_level_of_the_sinks_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sink is a destination of Nuclio's platform; here is one log."""
    assert load(tmp_path, {"loggerSinks": [{"level": "Warn"}, {"level": "info", "sink": "es"}]}).log_level == "info"
    assert "spec.loggerSinks[1]: without effect in Headrace: sink" in caplog.text
    assert load(tmp_path).log_level == ""


def test_exactly_once_needs_the_cluster_of_the_outputs(tmp_path: Path) -> None:
    """A transaction has one cluster, so brokers of the trigger's own are refused."""
    from headrace.config.model import HeadraceConfig

    load(tmp_path, delivery="exactly_once", brokers=["elsewhere:9092"])
    with pytest.raises(FunctionInvalid, match=r"delivery: is exactly_once, and outputs go to the brokers of headrace"):
        load_function(tmp_path, HeadraceConfig())


def test_sticky_is_cooperative_and_a_short_rebalance_is_raised_to_the_session(tmp_path: Path) -> None:
    """The client has no eager sticky assignor, and refuses less than the session."""
    found = only(load(tmp_path, balanceStrategy="sticky", sessionTimeout="90s")).kafka.member.client_properties({})
    assert found["partition.assignment.strategy"] == "cooperative-sticky"
    assert found["max.poll.interval.ms"] == 90_000
