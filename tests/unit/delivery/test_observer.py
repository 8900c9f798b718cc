"""`on_completed` of a pump gets everything that has ended, once, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.outcomes import ACK, HANDED_OFF, DeadLetter, Delivery, Outcome, Reply
from headrace.errors import DestinationUnavailable
from headrace.records import Record
from headrace.testing.pump_harness import P0, Harness, running

RETRY, DEAD = Reply("E"), Reply("Bad", permanent=True)
SKIPPED, TOGETHER = Reply("HTTP 404", "", 404), Reply("HTTP 500", "", 500)
SCRIPTS = st.lists(
    st.lists(st.sampled_from([ACK, HANDED_OFF, RETRY, DEAD, SKIPPED, TOGETHER, None]), max_size=4), max_size=12
)


class Reports(Harness):
    """Each record has a script of replies, then succeeds; a retry topic takes each fifth dead letter."""

    def __init__(self, scripts: Sequence[Sequence[Reply | None]], ordering: str, **retry: Any) -> None:
        policy = {"max_delay_seconds": 2, "statuses": {"404": "skip", "500": "retry"}, **retry}
        hooks = {"on_completed": self.on_completed, "replay": "job"}
        super().__init__(ordering=ordering, max_records=4, retry=policy, hooks=hooks)
        self.scripts = [list(script) for script in scripts]
        self.reported: list[tuple[int, str]] = []
        self.sizes = self.elsewhere = 0

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        said = [(self.scripts[record.offset] or [ACK]).pop(0) for record in delivery.records]
        if None in said:
            raise DestinationUnavailable("down")
        self.elsewhere += said.count(HANDED_OFF)
        return [outcome for outcome in said if outcome]

    async def write(self, letters: Sequence[DeadLetter]) -> Any:
        return [place for place, letter in enumerate(letters) if letter.record.offset % 5 == 0]

    def on_completed(
        self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
    ) -> None:
        assert replay == "job"
        assert len(replies) == (0 if how == "delivered" else len(records))
        self.sizes += size_bytes
        self.reported += [(record.offset, how) for record in records]

    async def play(self) -> None:
        async with running(self):
            for offset in range(len(self.scripts)):
                self.feed(offset, key=b"%d" % (offset % 3))
            for _ in range(60):
                await self.clock.advance(60)
            assert self.pump.lanes[P0].tracker.in_flight_records == 0


@given(SCRIPTS, st.sampled_from(["partition", "key", "none"]), st.booleans())
def test_each_completion_is_reported_once(scripts: list[list[Reply | None]], ordering: str, last_retry: bool) -> None:
    """Records in a retry topic, and those that were handed off, are reported elsewhere."""
    harness = Reports(scripts, ordering, last_retry=last_retry)
    asyncio.run(harness.play())
    counts = harness.pump.numbers()
    hows = [how for _, how in harness.reported]
    assert len({offset for offset, _ in harness.reported}) == len(harness.reported)
    assert harness.sizes == len(harness.reported)
    assert {how: hows.count(how) for how in ("dead letter", "skipped", "given up")} == {
        "dead letter": counts["dead_letters"],
        "skipped": counts["skipped"],
        "given up": counts["given_up"],
    }
    assert (hows.count("delivered"), harness.elsewhere) == (counts["delivered"], counts["handed_off"])
    assert len(harness.reported) == len(scripts) - counts["delayed"] - harness.elsewhere
