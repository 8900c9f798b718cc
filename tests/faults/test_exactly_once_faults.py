"""Exactly-once functions while transactions are aborted, commits are not confirmed and coordinators are killed.

The checker reads the topics and the offsets of the group. Processes that were changed for it show that it finds what
it looks for.
"""

from __future__ import annotations

import contextlib

import pytest

from headrace.errors import HeadraceError
from headrace.records import Record
from headrace_devkit.testing import Cluster, StartHeadrace
from headrace_devkit.testing.proxy import END_TRANSACTION, FaultProxy
from tests.exactly_once import SLOW, LaneOf, by_id, check, committed_records, fill, violations, write_function
from tests.faults.ledger import Ledger
from yaml_table import table

RECORDS = 2000
ABORTS = table(__file__, "aborts")
UNCONFIRMED = table(__file__, "unconfirmed")
KILLED = table(__file__, "killed")
OFFSETS_OUTSIDE = f"""{KILLED}
from headrace.functions.exactly_once import TransactionalPump
from headrace.kafka.transactions.transaction_job import GroupOffsets

count, write = 0, TransactionalPump._write_once

async def _write_once(self, portion):
    global count
    count += 1
    blame = await write(self, portion)
    if count == 3:
        kill_once()
    if not any(blame):
        self._consumer.commit(portion.offsets)
    return blame

GroupOffsets.send = lambda self, client: None
TransactionalPump._write_once = _write_once
"""
NO_REWIND = f"""{ABORTS.format(aborts="count == 3")}
from headrace.functions.exactly_once import TransactionalPump

TransactionalPump._begin_again = lambda self, lanes, error, pause_seconds: None
"""
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
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("mutant", "wrong", "is_killed"),
    [(OFFSETS_OUTSIDE, "is visible 2 times", True), (NO_REWIND, "is missing", False)],
    ids=["offsets-outside", "no-rewind"],
)
def test_the_checker_finds_what_a_changed_headrace_does_wrong(
    ledger: Ledger, headrace: StartHeadrace, mutant: str, wrong: str, is_killed: bool
) -> None:
    """Offsets apart from the transaction, or no rewind."""
    source, target = ledger.new_topic(3), ledger.new_topic()
    fill(ledger, source, 3000)
    times = {"sessionTimeout": "3s", "heartbeatInterval": "500ms"}  # how long a killed member keeps its partitions
    file = write_function(ledger.folder, source, target, SLOW, **times)
    # Longer than the test, so that Kafka does not end by itself what a killed process has left open.
    more = {"producer": {"properties": {"transaction.timeout.ms": 600_000}}}
    process = headrace({**ledger.config, **more, "functions": [file]}, wait=False, env=ledger.changed(mutant))
    if is_killed:
        ledger.wait_until(lambda: process.exit_code is not None, "the end of the process")
        process.start()
    ledger.wait_until(lambda: committed_records(ledger, source) == 3000, "every record committed")
    # A producer begins a transaction when Kafka has ended the one before, and all of that is visible.
    fill(ledger, source, 3)
    ledger.wait_until(lambda: committed_records(ledger, source) == 3003, "later records committed")
    inputs = [record for record in ledger.records(source) if record.offset < 1000]
    found = violations(inputs, ledger.records(target), ledger.committed(f"{source}-work"), by_id)
    assert [text for text in found if wrong in text], found[:5]
    process.kill()


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(500)
@pytest.mark.parametrize("is_carried_out", [False, True], ids=["request-lost", "response-lost"])
def test_the_coordinator_is_killed_between_the_request_of_a_commit_and_its_response(
    kafka_three: Cluster, kafka_network: FaultProxy, ledger: Ledger, headrace: StartHeadrace, is_carried_out: bool
) -> None:
    """Its successor ends the transaction once, whether the request was lost or only its response."""
    source, target = ledger.new_topic(3), ledger.new_topic(3)
    file = write_function(ledger.folder, source, target, SLOW)
    process = headrace({"kafka": {"bootstrap_servers": kafka_network.bootstrap_servers}, "functions": [file]})

    def committed() -> int:
        with contextlib.suppress(HeadraceError):  # a broker is down just now
            return committed_records(ledger, source)
        return 0

    fill(ledger, source, 6000)
    ledger.wait_until(lambda: committed() > 300, "progress")
    kafka_network.hold(END_TRANSACTION)
    ledger.wait_until(lambda: kafka_network.held, "the request of a commit")
    at = committed()
    if is_carried_out:
        kafka_network.silence(requests=False)
        ledger.wait_until(lambda: committed() > at, "the commit, whose response is held")
    [(_, coordinator)] = kafka_network.held
    with ledger.killed(coordinator):
        kafka_network.cut()
        kafka_network.heal()
        fill(ledger, source, 600)
        ledger.wait_until(lambda: committed() == 6600, "every record committed, without the broker")
        assert " is replaced: " in process.output
    check(ledger, source, target, lane_of=lambda each: each.partition)
    assert process.terminate() == 0
