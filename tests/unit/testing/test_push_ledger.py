"""The checker of deliveries finds each anomaly and calls it by its name; what is as promised passes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from headrace.delivery.offset_map import encode
from headrace.records import Header, Record
from headrace_devkit.testing.history import Attempt, Commit, Pushed
from headrace_devkit.testing.ledger import Fault
from headrace_devkit.testing.push_ledger import check_pushed

RECORDS = 30
LETTER = 12
CRASH = Fault(begin=20.0, end=21.0, most=3)


@dataclass
class Run:
    """What happened in one partition, to be spoiled."""

    log: list[Record]
    attempts: list[Attempt]
    letters: list[Record]
    commits: list[Commit]

    @property
    def pushed(self) -> Pushed:
        return Pushed(self.log, self.attempts, self.letters, self.commits)

    def change(self, index: int, **fields: object) -> None:
        self.attempts[index] = self.attempts[index]._replace(**fields)  # type: ignore[arg-type]


def letter_of(record: Record, at: float) -> Record:
    names = ("topic", "partition", "offset", "timestamp", "group", "attempts", "first_failure", "last_failure")
    values = ("t", "0", str(record.offset), "0", "g", "1", "", "")
    headers: list[Header] = [
        (f"headrace.dlq.{name}", text.encode())
        for name, text in zip((*names, "error", "reason"), (*values, "", ""), strict=True)
    ]
    return Record("t.dlq", 0, record.offset, int(at * 1000), record.key, record.value, lambda: headers)


def history(seed: int) -> Run:
    """A record a second, each committed at once, offsets with gaps, two keys in turn; one becomes a letter."""
    chance = random.Random(seed)
    offsets = list(itertools.accumulate(chance.choice([1, 1, 1, 2]) for _ in range(RECORDS)))
    log = [Record("t", 0, o, 0, b"k%d" % (n % 2), b"%d-%d" % (seed, n)) for n, o in enumerate(offsets)]
    attempts, letters, commits = [], [], []
    for number, record in enumerate(log):
        at = float(number)
        ended = at + 0.5 if number != LETTER else float("inf")
        attempts.append(Attempt(number, at, record.offset, record.key, record.value, ended))
        if number == LETTER:
            letters.append(letter_of(record, at + 0.5))
        commits.append(Commit(at + 0.75, offsets[number + 1] if number + 1 < RECORDS else record.offset + 1))
    return Run(log, attempts, letters, commits)


def lose_what_was_delivered(run: Run) -> None:
    run.change(5, ended_at=float("inf"))


def lose_the_letter(run: Run) -> None:
    run.letters.clear()


def skip(run: Run) -> None:
    del run.attempts[5]


def commit_too_early(run: Run) -> None:
    run.commits[5] = run.commits[5]._replace(at=run.attempts[5].at + 0.25)


def commit_before_the_letter(run: Run) -> None:
    run.letters[0] = letter_of(run.log[LETTER], LETTER + 0.9)


def a_map_that_says_too_much(run: Run) -> None:
    base, end = run.commits[5].offset, run.log[8].offset + 1
    text = encode(base, end, [run.log[6].offset, run.log[7].offset])
    run.commits[5] = run.commits[5]._replace(metadata=text)


def commit_backwards(run: Run) -> None:
    run.commits.insert(9, run.commits[6]._replace(at=9.0))


def overtake_in_the_key(run: Run) -> None:
    """The third of a key comes before the second has ended."""
    run.change(6, at=4.25)


def overtake_in_the_partition(run: Run) -> None:
    run.change(6, at=5.25)


def repeat(run: Run) -> None:
    run.attempts.append(run.attempts[5]._replace(request=99, at=9.0, ended_at=9.1))


def repeat_after_the_crash_though_committed_before(run: Run) -> None:
    run.attempts.append(run.attempts[5]._replace(request=99, at=20.5, ended_at=20.6))


def repeat_more_than_was_in_flight(run: Run) -> None:
    for commit in range(18, 23):  # nothing was committed just before the crash
        run.commits[commit] = run.commits[commit]._replace(at=23.0)
    again = [attempt._replace(request=99, at=20.9, ended_at=21.0) for attempt in run.attempts[17:21]]
    run.attempts += [*again, *[attempt._replace(request=100, at=22.9) for attempt in again]]


def two_letters(run: Run) -> None:
    run.letters.append(letter_of(run.log[LETTER], 15.0))


def deliver_what_is_not_there(run: Run) -> None:
    run.change(5, value=b"from nowhere")


def bury_what_is_not_there(run: Run) -> None:
    run.letters.append(letter_of(Record("t", 0, 10_000, 0, None, b"from nowhere"), 15.0))


def bury_with_another_key(run: Run) -> None:
    letter = run.letters[0]
    run.letters[0] = Record("t.dlq", 0, 0, letter.timestamp_ms, b"other", letter.value, letter.read_headers)


def stop_short(run: Run) -> None:
    run.commits.pop()


def commit_nothing(run: Run) -> None:
    run.commits.clear()


PLANTED: list[tuple[Callable[[Run], None], set[str]]] = [
    (lose_what_was_delivered, {"lost", "ahead", "order"}),
    (lose_the_letter, {"lost", "ahead", "order"}),
    (skip, {"skipped", "ahead", "order"}),
    (commit_too_early, {"ahead"}),
    (commit_before_the_letter, {"ahead"}),
    (a_map_that_says_too_much, {"ahead"}),
    (commit_backwards, {"back"}),
    (overtake_in_the_key, {"order"}),
    (repeat, {"repeat"}),
    (repeat_after_the_crash_though_committed_before, {"repeat"}),
    (repeat_more_than_was_in_flight, {"repeat"}),
    (two_letters, {"repeat"}),
    (deliver_what_is_not_there, {"phantom"}),
    (bury_what_is_not_there, {"phantom"}),
    (bury_with_another_key, {"phantom"}),
    (stop_short, {"behind"}),
    (commit_nothing, {"behind"}),
]


@pytest.mark.parametrize(("plant", "kinds"), PLANTED, ids=lambda case: getattr(case, "__name__", ""))
def test_each_anomaly_is_found_and_called_by_its_name(plant: Callable[[Run], None], kinds: set[str]) -> None:
    """Planted alone in many histories, it is all that is said; what is lost holds up the order, too."""
    for seed in range(20):
        run = history(seed)
        plant(run)
        assert {text.partition(":")[0] for text in check_pushed(run.pushed, "key", [CRASH])} == kinds


def test_histories_as_promised_pass_in_every_order() -> None:
    """Gaps, two keys and a dead letter, and nothing to be said."""
    for seed in range(200):
        run = history(seed).pushed
        assert check_pushed(run, "partition") == check_pushed(run, "key") == check_pushed(run, "none") == []


def test_order_is_what_was_promised() -> None:
    """Another key may overtake where order is by key; nothing waits where there is no order."""
    run = history(1)
    overtake_in_the_partition(run)
    assert [text.partition(":")[0] for text in check_pushed(run.pushed, "partition")] == ["order"]
    assert check_pushed(run.pushed, "key") == []
    overtake_in_the_key(run)
    assert check_pushed(run.pushed, "none") == []
