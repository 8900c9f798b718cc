"""Reading function.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.delivery.outcomes import Reply
from headrace.delivery.policy import action_of
from headrace.errors import FunctionInvalid
from headrace.functions.file_values import parse_duration, parse_size
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


def test_what_a_failure_means_is_written_as_for_a_reactive_consumer(tmp_path: Path) -> None:
    """The whole section is there."""
    lines = "        retry: {attempts: 2, errors: {ValueError: dead_letter}}\n"
    [trigger] = load(tmp_path, with_attributes(lines)).kafka_triggers
    assert trigger.retry.attempts == 2
    assert trigger.retry.action_of_error("ValueError") == "dead_letter"
    assert load(tmp_path, with_attributes("        retry: {topics: [10]}\n")).kafka_triggers[0].retry.topics == [10]
    with pytest.raises(FunctionInvalid, match=r"retry\.errors\.ValueError: should be 'retry', 'dead_letter', 'skip'"):
        load(tmp_path, with_attributes("        retry: {errors: {ValueError: drop}}\n"))


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


@pytest.mark.parametrize("handler", table(__file__, "a_check_finds_the_handler_without_running"))
def test_a_check_finds_the_handler_without_running_it(tmp_path: Path, handler: str) -> None:
    """The module is read, not imported."""
    code = "from os import path as imported\ndef handler(c, e): ...\nif imported:\n    late = 1\nraise SystemExit\n"
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/sub.py").write_text("from elsewhere import *\n")
    (tmp_path / "function.yaml").write_text(with_attributes().replace("main:handler", handler))
    assert load_function(tmp_path, check_handler=True).handler == handler


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere is one clear sentence."""
    with pytest.raises(FunctionInvalid, match=r"nowhere\.yaml: cannot be read"):
        load_function(tmp_path / "nowhere.yaml")


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


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1000", 1000), ("512Mi", 512 << 20), ("2G", 2 * 10**9), ("1k", 1000)]
)
def test_sizes_are_written_as_in_kubernetes(text: str, size: int) -> None:
    """With a unit of a thousand or of 1024."""
    assert parse_size(text) == size


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


@pytest.mark.parametrize(("text", "seconds"), table(__file__, "durations_are_read_as_in_go"))
def test_durations_are_read_as_in_go(text: str, seconds: float | None) -> None:
    """Each unit and form of Go's grammar; bare numbers, blanks, other units and other digits are not durations."""
    if seconds is not None:
        assert parse_duration(text) == pytest.approx(seconds)
        return
    with pytest.raises(ValueError, match="not a valid duration"):
        parse_duration(text)
