"""Exactly-once functions while transactions are aborted and commits are not confirmed.

The checker reads the topics and the offsets of the group.
"""

from __future__ import annotations

import pytest

from headrace.records import Record
from headrace_devkit.testing import StartHeadrace
from tests.exactly_once import SLOW, LaneOf, by_id, check, committed_records, fill, write_function
from tests.faults.ledger import Ledger
from yaml_table import table

RECORDS = 2000
ABORTS = table(__file__, "aborts")
UNCONFIRMED = table(__file__, "unconfirmed")
NEVER_RETURNS = table(__file__, "never-returns")
FAILING = SLOW.replace(
    "    return", "    if int(event.body) % 50 == 0:\n        raise ValueError(event.id)\n    return"
)


def function_or_dead_letter(record: Record) -> list[bytes | None]:
    """Return the output of a record, or the dead letter of one that fails."""
    return [record.value] if int(record.value or b"") % 50 == 0 else by_id(record)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("fault", "ordering"),
    [
        pytest.param(ABORTS.format(aborts="count % 4 == 0"), "partition", marks=pytest.mark.long),
        (ABORTS.format(aborts="count % 4 == 0"), "key"),
        pytest.param(ABORTS.format(aborts="count % 4 == 0"), "none", marks=pytest.mark.long),
        pytest.param(UNCONFIRMED, "partition", marks=pytest.mark.long),
        pytest.param(UNCONFIRMED, "key", marks=pytest.mark.long),
    ],
    ids=["aborts-partition", "aborts-key", "aborts-none", "unconfirmed-partition", "unconfirmed-key"],
)
def test_transactions_that_fail_lose_and_repeat_nothing(
    ledger: Ledger, headrace: StartHeadrace, fault: str, ordering: str
) -> None:
    """Each fourth is aborted, or each fifth commit is not confirmed, every other one of which was carried out."""
    source, target = ledger.new_topic(3), ledger.new_topic(3)
    fill(ledger, source, RECORDS, keys=40)
    file = write_function(
        ledger.folder, source, target, FAILING, ordering=ordering, retry={"first_delay_seconds": 0.05}
    )
    process = headrace({**ledger.config, "functions": [file]}, env=ledger.changed(fault))
    ledger.wait_until(lambda: committed_records(ledger, source) == RECORDS, "every record committed")
    assert "its records are delivered again" in process.output
    lanes: dict[str, LaneOf | None] = {
        "partition": lambda each: each.partition,
        "key": lambda each: (each.partition, each.key),
        "none": None,
    }
    check(ledger, source, target, function_or_dead_letter, lane_of=lanes[ordering])
    assert process.terminate() == 0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_call_of_the_client_that_never_returns_does_not_stop_the_others(
    ledger: Ledger, headrace: StartHeadrace
) -> None:
    """Kafka's client can wait for ever for the coordinator of a group, whatever its limit."""
    source, target = ledger.new_topic(3), ledger.new_topic(3)
    fill(ledger, source, RECORDS, keys=40)
    file = write_function(ledger.folder, source, target, SLOW, ordering="key")
    process = headrace({**ledger.config, "functions": [file]}, env=ledger.changed(NEVER_RETURNS))
    ledger.wait_until(lambda: committed_records(ledger, source) == RECORDS, "every record committed")
    assert process.output.count("the call hangs") == 2
    check(ledger, source, target, by_id, lane_of=lambda each: (each.partition, each.key))
    assert process.terminate() == 0
