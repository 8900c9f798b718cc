"""The policy of a trigger for failures, and which triggers share their workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.delivery.policy import action_of
from headrace.delivery.protocols import Reply
from headrace.functions.load import load_function
from headrace.functions.spec import FunctionSpec, parse_size


def load(folder: Path, triggers: dict[str, dict[str, Any]]) -> FunctionSpec:
    """Load a function with these triggers; each is its attributes, and its `allocator` if that has a name."""
    found = {
        name: {
            "kind": "kafka",
            "workerAllocatorName": attributes.pop("allocator", ""),
            "attributes": {"topics": [name], "consumerGroup": "g", **attributes},
        }
        for name, attributes in triggers.items()
    }
    (folder / "function.yaml").write_text(json.dumps({"spec": {"handler": "main:handler", "triggers": found}}))
    return load_function(folder)


@pytest.mark.parametrize(
    ("on_failure", "actions", "dead_letters"),
    [
        ("retry", ["retry", "dead_letter", "dead_letter"], True),
        ("deadLetter", ["dead_letter", "dead_letter", "dead_letter"], True),
        ("handled", ["skip", "dead_letter", "dead_letter"], True),
        ("stop", ["retry", "dead_letter", "dead_letter"], False),
    ],
)
def test_the_policy_for_failures_in_one_word(
    tmp_path: Path, on_failure: str, actions: list[str], dead_letters: bool
) -> None:
    """A class with a line of its own keeps its action; a record that kills workers is never taken for handled."""
    attributes = {"onFailure": on_failure, "retry": {"errors": {"KeyError": "dead_letter"}}}
    [trigger] = load(tmp_path, {"a": attributes}).triggers
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
    triggers = {"a": {"allocator": "both"}, "b": {"allocator": "both", "workerAllocationMode": "key"}, "c": {}}
    function = load(tmp_path, triggers)
    assert [[trigger.name for trigger in pool] for pool in function.worker_pools] == [["a", "b"], ["c"]]
    assert [trigger.ordering for trigger in function.triggers] == ["partition", "key", "partition"]
