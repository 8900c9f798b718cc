"""The checker finds each anomaly, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from headrace.records import Record
from headrace_devkit.testing.ledger import Fault, Sent, check_produced

RUNS = 1000
FAULT = Fault(begin=40.0, end=60.0, most=8)


class History(NamedTuple):
    """What happened in one run, as it may be."""

    sent: list[Sent]
    log: list[Record]


def history(seed: int) -> History:
    """Clients send in turn, one record at a time; within the fault some fail, some are unknown and half of those there.

    Offsets have gaps, as transactions and compaction leave them.
    """
    rng = random.Random(seed)
    ends = [0, 0, 0]
    sent, log, unknown = [], [], 0
    for number in range(100):
        value, key = f"{seed}-{number}".encode(), rng.choice([None, b"k"])
        partition = rng.randrange(3)
        ends[partition] += rng.choice([1, 1, 1, 2])
        entry = Sent(number % 4, key, value, float(number), number + 0.9, "ok", partition, ends[partition])
        odd = FAULT.begin <= number < FAULT.end and rng.random() < 0.3
        if odd and rng.random() < 0.5:
            entry = entry._replace(outcome="fail", partition=-1, offset=-1)
        elif odd and unknown < FAULT.most:
            unknown += 1
            entry = entry._replace(outcome="unknown", partition=-1, offset=-1)
        sent.append(entry)
        if entry.outcome == "ok" or (entry.outcome == "unknown" and rng.random() < 0.5):
            log.append(Record("t", partition, ends[partition], 0, key, value))
    return History(sent, log)


def an_ok(run: History) -> tuple[int, int]:
    """Return where a record that is ok is in the history and in the log."""
    index = next(i for i, entry in enumerate(run.sent) if i > 20 and entry.outcome == "ok")
    return index, next(i for i, record in enumerate(run.log) if record.value == run.sent[index].value)


def lose(run: History) -> None:
    del run.log[an_ok(run)[1]]


def move(run: History) -> None:
    index, _ = an_ok(run)
    run.sent[index] = run.sent[index]._replace(partition=7)


def swap_two_places(run: History) -> None:
    last: dict[tuple[int, int], int] = {}
    for index, entry in enumerate(run.sent):
        if entry.outcome != "ok":
            continue
        if (entry.client, entry.partition) in last:
            first = last[entry.client, entry.partition]
            break
        last[entry.client, entry.partition] = index
    one, two = run.sent[first], run.sent[index]
    run.sent[first], run.sent[index] = one._replace(offset=two.offset), two._replace(offset=one.offset)
    at = {record.value: i for i, record in enumerate(run.log)}
    run.log[at[one.value]] = Record("t", one.partition, two.offset, 0, one.key, one.value)
    run.log[at[two.value]] = Record("t", two.partition, one.offset, 0, two.key, two.value)


def deny(run: History) -> None:
    index, _ = an_ok(run)
    run.sent[index] = run.sent[index]._replace(outcome="fail")


def invent(run: History) -> None:
    run.log.append(Record("t", 0, 9999, 0, None, b"from nowhere"))


def empty(run: History) -> None:
    run.log.append(Record("t", 0, 9999, 0, None, None))


def repeat(run: History) -> None:
    record = run.log[an_ok(run)[1]]
    run.log.append(Record("t", record.partition, 9999, 0, record.key, record.value))


def change_the_key(run: History) -> None:
    _, index = an_ok(run)
    record = run.log[index]
    run.log[index] = Record("t", record.partition, record.offset, 0, b"other", record.value)


def forget_before_the_fault(run: History) -> None:
    index, _ = an_ok(run)
    run.sent[index] = run.sent[index]._replace(outcome="unknown")


def forget_after_the_fault(run: History) -> None:
    run.sent.append(Sent(0, None, b"late", FAULT.end + 0.1, FAULT.end + 5, "unknown"))


def forget_too_many(run: History) -> None:
    for number in range(FAULT.most + 1):
        run.sent.append(Sent(0, None, b"u%d" % number, FAULT.begin, FAULT.end, "unknown"))


@pytest.mark.parametrize(
    ("plant", "kinds"),
    [
        (lose, {"lost"}),
        (move, {"moved"}),
        (swap_two_places, {"order"}),
        (deny, {"ghost"}),
        (invent, {"phantom"}),
        (empty, {"phantom"}),
        (repeat, {"double"}),
        (change_the_key, {"key"}),
        (forget_before_the_fault, {"unknown"}),
        (forget_after_the_fault, {"unknown"}),
        (forget_too_many, {"unknown"}),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_each_anomaly_is_found_and_called_by_its_name(plant: Callable[[History], None], kinds: set[str]) -> None:
    """Planted alone in many histories, it is the only one that is found."""
    for seed in range(20):
        run = history(seed)
        plant(run)
        found = check_produced(run.sent, run.log, [FAULT])
        assert {text.partition(":")[0] for text in found} == kinds


def test_histories_without_an_anomaly_pass() -> None:
    """Gaps, fails that are not there, and unknown ones that are or are not."""
    outcomes: set[str] = set()
    for seed in range(RUNS):
        run = history(seed)
        outcomes |= {entry.outcome for entry in run.sent}
        assert check_produced(run.sent, run.log, [FAULT]) == []
    assert outcomes == {"ok", "fail", "unknown"}
