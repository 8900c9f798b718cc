"""The checker of deliveries explains by a seek, a skip or a pause exactly what that does, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.records import Record
from headrace_devkit.testing import Attempt, Commit, Operation, PauseSpan, Pushed, Seek, Skip, check_pushed

LOG = [Record("t", 0, offset, 0, b"k", b"v%d" % offset) for offset in range(20)]
LOST = {"skipped", "ahead", "order"}
"""Anomalies of a record that was committed and never delivered, when later ones were."""


class Story:
    """One record a second, committed at once; the clock goes on with every step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.attempts: list[Attempt] = []
        self.commits: list[Commit] = []
        self.operations: list[Operation] = []

    def deliver(self, *offsets: int) -> None:
        for offset in offsets:
            self.attempt([offset], 0.5)
            self.commit(offset + 1)

    def attempt(self, offsets: Sequence[int], seconds: float) -> None:
        number = len(self.attempts)
        for offset in offsets:
            record = LOG[offset]
            self.attempts.append(Attempt(number, self.now, offset, record.key, record.value, self.now + seconds))
        self.now += min(seconds, 0.5)

    def commit(self, offset: int, metadata: str = "") -> None:
        self.commits.append(Commit(self.now, offset, metadata))
        self.now += 0.5

    def seek(self, offset: int, committed: int | None = None) -> None:
        begin = self.now
        self.now += 0.2
        self.commit(offset if committed is None else committed, "\0")  # as the client writes that there is no text
        self.operations.append(Seek(begin, self.now, offset))
        self.now += 0.1

    def skip(self, offset: int) -> None:
        self.operations.append(Skip(self.now, self.now + 0.1, offset))
        self.now += 0.2

    def kinds(self, **given: Any) -> set[str]:
        run = Pushed(LOG, self.attempts, [], self.commits)
        found = check_pushed(run, "partition", **{"operations": self.operations, **given})
        return {text.partition(":")[0] for text in found}


def test_a_seek_explains_the_jump_to_its_offset_and_no_other() -> None:
    """Skipped offsets need no delivery; a commit beyond the offset, and later lost records, are still found."""
    for committed, missing, kinds in ((12, 0, set()), (13, 0, LOST), (12, 15, LOST)):
        story = Story()
        story.deliver(*range(5))
        story.seek(12, committed)
        story.deliver(*(offset for offset in range(committed, 20) if offset != missing))
        assert story.kinds() == kinds


def test_a_skip_explains_one_record_and_no_other() -> None:
    """Another lost record is still found, and so is one that was committed before it was skipped."""
    story = Story()
    story.deliver(0, 1)
    story.skip(2)
    story.deliver(*range(3, 20))
    assert story.kinds() == set()
    assert story.kinds(operations=()) == LOST
    del story.attempts[4]
    assert story.kinds() == LOST
    late = Story()
    late.deliver(0, 1, 3)
    late.skip(2)
    late.deliver(*range(4, 20))
    assert late.kinds() == {"ahead", "order"}


def test_nothing_is_delivered_while_a_partition_is_paused() -> None:
    """From when what was in flight had ended until it was released."""
    story = Story()
    story.deliver(*range(10))
    begin = story.now
    story.now += 5
    story.operations.append(PauseSpan(begin, story.now - 0.1))
    story.deliver(*range(10, 20))
    assert story.kinds() == set()
    story.operations.append(PauseSpan(begin, story.now))
    assert story.kinds() == {"paused"}
