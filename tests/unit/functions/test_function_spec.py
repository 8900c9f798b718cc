"""Reading function.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.delivery.outcomes import Reply
from headrace.delivery.policy import action_of
from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function
from headrace.functions.spec import FunctionSpec
from yaml_table import table

HEAD = "spec:\n  handler: main:handler\n  triggers:\n    k:\n      kind: kafka-cluster\n"

UNMODIFIED = Path(__file__).with_name("unmodified.yaml").read_text()


def load(tmp_path: Path, text: str) -> FunctionSpec:
    (tmp_path / "function.yaml").write_text(text)
    return load_function(tmp_path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split(": ", 1)[1] for record in caplog.records]


def with_attributes(lines: str = "", topics: str = "[t]") -> str:
    return f"{HEAD}      attributes:\n        topics: {topics}\n        consumerGroup: g\n{lines}"


def test_an_unmodified_nuclio_file_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every documented field is read, or accepted, or named in the log as without effect."""
    spec = load(tmp_path, UNMODIFIED)
    assert (spec.name, spec.namespace, spec.handler, spec.env) == ("enrich", "ns", "pkg.module:func", {"A": "b"})
    assert (spec.event_timeout_seconds, spec.readiness_timeout_seconds, spec.folder) == (30, 120, tmp_path)
    [trigger] = spec.kafka_triggers
    assert (trigger.name, trigger.kind, trigger.topics, trigger.kafka.group) == ("my-kafka", "kafka", ["t1", "t2"], "g")
    assert (trigger.kafka.brokers, trigger.kafka.auto_offset_reset, trigger.workers) == (["host:9092"], "latest", 4)
    assert trigger.termination_seconds == 7
    assert warnings(caplog) == [
        "spec: without effect in Headrace: volumes, minReplicas, disableDefaultHTTPTrigger",
        "spec.triggers.my-kafka.attributes: without effect in Headrace: rebalanceRetryMax",
    ]


def test_a_trigger_chooses_its_order_and_what_nuclio_has_no_name_for(tmp_path: Path) -> None:
    """As attributes, or the order as an annotation; Nuclio's own names win where both are written."""
    more = "{properties: {group.instance.id: a-1, fetch.min.bytes: 9}}"
    lines = f"        ordering: KEY\n        fetchMin: 7\n        consumer: {more}\n"
    [trigger] = load(tmp_path, with_attributes(lines)).kafka_triggers
    assert trigger.ordering == "key"
    found = trigger.kafka.member.client_properties({})
    assert (found["group.instance.id"], found["fetch.min.bytes"]) == ("a-1", 7)
    annotated = "metadata: {annotations: {nuclio.io/kafka-ordering: none}}\n" + with_attributes()
    assert load(tmp_path, annotated).kafka_triggers[0].ordering == "none"


def test_every_problem_comes_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Problems of triggers, of the whole and of keys are one list."""
    text = with_attributes("        retry: {attempts: 0}\n        keyFormat: x\n").replace("main:handler", "main")
    with pytest.raises(FunctionInvalid) as caught:
        load(tmp_path, text + "  env: 3\n")
    lines = [line.split("function.yaml:")[1].split(": ")[0] for line in caught.value.description.splitlines()]
    assert lines == ["2", "9", "10", "11"]


@pytest.mark.parametrize(("before", "after", "named"), table(__file__, "what_has_no_effect_is_named"))
def test_what_has_no_effect_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str, named: list[str]
) -> None:
    """Nuclio ignores it silently; here the log has a warning with its line, and the file loads."""
    [trigger] = load(tmp_path, before + with_attributes() + after).kafka_triggers
    assert trigger.name == "k"
    logged = [record for record in caplog.records if record.name.startswith("headrace.")]
    named = [each.format(python=sys.executable, folder=tmp_path) for each in named]
    assert sorted(record.getMessage().removeprefix(f"{tmp_path}/") for record in logged) == named
    assert {record.levelname for record in logged} == {"WARNING"}


@pytest.mark.parametrize(("on_failure", "actions", "dead_letters"), table(__file__, "the_policy_for_failures_in_one"))
def test_the_policy_for_failures_in_one_word(
    tmp_path: Path, on_failure: str, actions: list[str], dead_letters: bool
) -> None:
    """A class with a line of its own keeps its action; a record that kills workers is never taken for handled."""
    lines = f"        onFailure: {on_failure}\n        retry: {{errors: {{KeyError: dead_letter}}}}\n"
    [trigger] = load(tmp_path, with_attributes(lines)).kafka_triggers
    replies = [Reply("ValueError"), Reply("KeyError"), Reply("WorkerLost", permanent=True)]
    assert [action_of(reply, trigger.retry) for reply in replies] == actions
    assert trigger.dead_letters.enabled is dead_letters


def test_triggers_share_workers_by_the_name_of_the_allocator(tmp_path: Path) -> None:
    """And keys have a worker only if each waits for the earlier records of its key."""
    both = "workerAllocatorName: both, kind: kafka, attributes: {consumerGroup: g"
    function = load(
        tmp_path,
        f"{with_attributes()}    a: {{{both}, topics: [a]}}}}\n"
        f"    b: {{{both}, topics: [b], workerAllocationMode: key}}}}\n",
    )
    assert [[trigger.name for trigger in pool] for pool in function.worker_pools] == [["k"], ["a", "b"]]
    assert [trigger.ordering for trigger in function.triggers] == ["partition", "partition", "key"]
