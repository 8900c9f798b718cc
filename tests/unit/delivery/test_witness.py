"""`on_ended` of a pump gets everything that has ended, once, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.context import PumpHooks
from headrace.delivery.protocols import ACK, DELEGATED, DeadLetter, Delivery, Outcome, Reply
from headrace.delivery.pump import Pump
from headrace.errors import DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.testing import ManualClock

P0 = TopicPartition("t", 0)
RETRY, DEAD = Reply("E"), Reply("Bad", permanent=True)
SKIPPED, TOGETHER = Reply("HTTP 404", "", 404), Reply("HTTP 500", "", 500)
SCRIPTS = st.lists(
    st.lists(st.sampled_from([ACK, DELEGATED, RETRY, DEAD, SKIPPED, TOGETHER, None]), max_size=4), max_size=12
)


class World:
    """Source, destination and dead letters of a pump; each record has its script, and is taken behind its end."""

    def __init__(self, scripts: Sequence[Sequence[Reply | None]], ordering: Any, **retry: Any) -> None:
        self.scripts = [list(script) for script in scripts]
        self.told: list[tuple[int, str]] = []
        self.sizes = self.elsewhere = 0
        self.clock = ManualClock()
        policy = RetryConfig(
            attempts=3, first_delay_seconds=1, max_delay_seconds=2, statuses={"404": "skip", "500": "retry"}, **retry
        )
        batch = BatchConfig(max_records=4)
        delivery = DeliveryConfig(ordering=ordering, batch=batch, retry=policy)
        hooks = PumpHooks(on_ended=self.on_ended, replay="job")
        self.pump = Pump("p", "g", self, self, delivery=delivery, clock=self.clock, chance=Random(1), hooks=hooks)
        self.pump.connect(self)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        said = [(self.scripts[record.offset] or [ACK]).pop(0) for record in delivery.records]
        if None in said:
            raise DestinationUnavailable("down")
        self.elsewhere += said.count(DELEGATED)
        return [outcome for outcome in said if outcome]

    async def write(self, letters: Sequence[DeadLetter]) -> list[int]:
        return [place for place, letter in enumerate(letters) if letter.record.offset % 5 == 0]  # a tier takes these

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        """Nothing is bounded."""

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Nothing is kept."""

    def on_ended(
        self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
    ) -> None:
        assert replay == "job"
        assert len(replies) == (0 if how == "delivered" else len(records))
        self.sizes += size_bytes
        self.told += [(record.offset, how) for record in records]

    async def run(self) -> None:
        records = [Record("t", 0, n, 0, b"%d" % (n % 3), b"v", size_bytes=2) for n in range(len(self.scripts))]
        await self.pump.start()
        self.pump.on_assigned({P0: 1}, {})
        self.pump.on_records(P0, 1, records)
        for _ in range(60):
            await self.clock.advance(60)
        assert self.pump.lanes[P0].tracker.open_records == 0
        await self.pump.stop()


@given(SCRIPTS, st.sampled_from(["partition", "key", "none"]), st.booleans())
def test_each_end_is_told_once(scripts: list[list[Reply | None]], ordering: str, last_retry: bool) -> None:
    """Whatever the destination says; what waits in a tier or was no delivery is told by others."""
    world = World(scripts, ordering, last_retry=last_retry)
    asyncio.run(world.run())
    counts = world.pump.numbers()
    hows = [how for _, how in world.told]
    assert len({offset for offset, _ in world.told}) == len(world.told)
    assert world.sizes == 2 * len(world.told)
    assert {how: hows.count(how) for how in ("dead letter", "skipped", "given up")} == {
        "dead letter": counts["dead_letters"],
        "skipped": counts["skipped"],
        "given up": counts["given_up"],
    }
    assert (hows.count("delivered"), world.elsewhere) == (counts["delivered"], counts["delegated"])
    assert len(world.told) == len(scripts) - counts["delayed"] - world.elsewhere
