"""A checker that cannot fail proves nothing: pumps with one line broken are caught, and the one that is whole is not.

A partition with gaps, a backend, a dead letter topic and a group of two, in memory and virtual time. The story is
always the same, and each of its steps waits for what the next one needs: a revoke with a slow delivery under way, a
dead letter topic that fails, a crash, a revoke with a delivery that hangs, and a loss that its owner hears of late.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.deliverer import Deliverer
from headrace.delivery.lane import Lane
from headrace.delivery.limit import AdaptiveLimit
from headrace.delivery.moves import Moves
from headrace.delivery.protocols import ACK, DELEGATED, DeadLetter, Delivery, Outcome, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.tracker import AckTracker
from headrace.errors import DeadLetterFailed
from headrace.lifecycle import Deadline
from headrace.records import Committed, Record, TopicPartition
from headrace.testing import ManualClock
from headrace.testing.history import Attempt, Commit, Operation, PauseSpan, Pushed, Seek, Skip
from headrace.testing.ledger import Fault
from headrace.testing.push_ledger import check_pushed

P0 = TopicPartition("t", 0)
RECORDS = 400
HELD = 12
"""Records a member holds at most."""
PATIENCE_SECONDS = 300.0


class Member:
    """One process of the group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.in_group = True
        self.position = 0
        self.held = 0
        delivery = DeliveryConfig(
            ordering="key",
            max_in_flight=4,
            batch=BatchConfig(max_records=2),
            retry=RetryConfig(attempts=3, first_delay_seconds=0.5, max_delay_seconds=1),
        )
        self.pump = Pump("pump", "g", world, world, delivery=delivery, clock=world.clock, chance=Random(1))
        self.pump.connect(self, self)

    keeps_offsets_elsewhere = False

    def trouble(self, partition: TopicPartition) -> str:
        return ""

    def pause_reason(self, partition: TopicPartition) -> str:
        return ""

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        world = self._world
        await world.clock.sleep(0.1)
        world.commit(to)
        await world.clock.sleep(0.1)
        world.assign(self)
        return True

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self.held -= records

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        # Kafka asks whether the sender is a member, not whether the partition is its own.
        if self.in_group:
            self._world.commit(offsets[P0])

    def take(self, epoch: int, committed: Committed | None) -> None:
        self.position, self.held = committed.offset if committed else 0, 0
        self.pump.on_assigned({P0: epoch}, {P0: committed} if committed else {})

    def feed(self, epoch: int) -> None:
        fresh = [r for r in self._world.log if r.offset >= self.position][: HELD - self.held]
        if fresh:
            self.position, self.held = fresh[-1].offset + 1, self.held + len(fresh)
            self.pump.on_records(P0, epoch, fresh)
        elif self.position > self._world.log[-1].offset:
            self.pump.on_end(P0, epoch, self.position)


class World:
    """Everything around the members, and what it remembers for the ledger."""

    def __init__(self, seed: int) -> None:
        chance = Random(seed)
        self.clock = ManualClock()
        offsets = list(itertools.accumulate(chance.choice([1, 1, 2]) for _ in range(RECORDS)))
        self.log = [Record("t", 0, o, 0, b"k%d" % chance.randrange(9), b"%d" % o) for o in offsets]
        self.failures = {record.offset: int(chance.random() < 0.1) for record in self.log}
        self.aimed_delay_seconds = self.aimed_failures = 0.0
        """What the next delivery has to it."""
        self.attempts: list[Attempt] = []
        self.letters: list[Record] = []
        self.letters_to_fail = 3
        self.commits: list[Commit] = []
        self.faults: list[Fault] = []
        self.operations: list[Operation] = []
        self.aimed = 0
        """The first record of the delivery that was aimed at."""
        self.requests = 0
        self.epoch = 0
        self.members: list[Member] = []
        self.owner: Member

    # What the members meet ---------------------------------------------------------------------------------------

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        at, delay = self.clock.time(), self.aimed_delay_seconds or 0.1
        self.failures[delivery.records[0].offset] += int(self.aimed_failures)
        if self.aimed_delay_seconds:
            self.aimed = delivery.records[0].offset
        self.aimed_delay_seconds = self.aimed_failures = 0.0
        self.requests += 1
        again = Reply("E", "again")
        outcomes = [ACK if delivery.attempt > self.failures[r.offset] else again for r in delivery.records]
        for record, outcome in zip(delivery.records, outcomes, strict=True):
            # Once it has come it is handled, whether anybody still waits for the answer or not.
            ended = at + delay if outcome is ACK and delay < PATIENCE_SECONDS else math.inf
            self.attempts.append(Attempt(self.requests, at, record.offset, record.key, record.value, ended))
        await self.clock.sleep(delay)
        return outcomes

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        await self.clock.sleep(0.5)
        self.letters_to_fail -= 1
        if self.letters_to_fail >= 0:
            raise DeadLetterFailed("down")
        for letter in letters:
            record, headers = letter.record, headers_of(letter)
            at = int(self.clock.time() * 1000)
            self.letters.append(Record("t.dlq", 0, 0, at, record.key, record.value, lambda headers=headers: headers))

    def commit(self, committed: Committed) -> None:
        self.commits.append(Commit(self.clock.time(), *committed))

    # The story ---------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        first, second = await self._member(), await self._member()
        self.assign(first)
        await self._hit(delay_seconds=2.0)
        await self._revoke()
        self.assign(second)
        await self._hit(failures=99)
        await self._run(lambda: self.letters_to_fail < 3)
        now = self.clock.time()
        second.in_group = False
        await second.pump.stop()
        self.faults.append(Fault(now, now))
        self.assign(first)
        await self._run(lambda: bool(self.letters))
        await self._hit(delay_seconds=1000.0)
        await self._revoke()
        third = await self._member()
        self.assign(third)
        await self._hit(delay_seconds=8.0)
        now = self.clock.time()
        third.in_group = False
        self.assign(first)
        await self._run(lambda: self.clock.time() > now + 5)
        third.in_group = True  # it has joined again by the time it hears
        third.pump.on_lost([P0])
        self.faults.append(Fault(now, self.clock.time()))
        await self._steer(first.pump)
        await self._run(lambda: bool(self.commits) and self.commits[-1].offset > self.log[-1].offset)
        await self._run(lambda: self.clock.time() > now + 20)

    async def _steer(self, pump: Pump) -> None:
        """Skip what hangs, send the group back and forth with deliveries in flight, and let it stand still a while."""
        await self._hit(delay_seconds=1000.0)
        begin = self.clock.time()
        skip = asyncio.ensure_future(pump.moves.skip(P0, self.aimed, "it hangs"))
        await self._run(skip.done)
        self.operations.append(Skip(begin, self.clock.time(), self.aimed))
        await self._run(lambda: self.clock.time() > begin + 1)
        for step in (-20, 10):
            await self._hit(delay_seconds=1.0)
            begin, offset = self.clock.time(), self.commits[-1].offset + step
            seek = asyncio.ensure_future(pump.moves.seek(P0, offset))
            await self._run(seek.done)
            self.operations.append(Seek(begin, self.clock.time(), offset))
        pump.pause([P0], "paused")
        await self._run(lambda: not pump.status().partitions[P0].in_flight)
        begin = self.clock.time()
        await self._run(lambda: self.clock.time() > begin + 5)
        self.operations.append(PauseSpan(begin, self.clock.time()))
        pump.resume([P0])

    async def _member(self) -> Member:
        member = Member(self)
        await member.pump.start()
        self.members.append(member)
        return member

    def assign(self, member: Member) -> None:
        self.epoch, self.owner = self.epoch + 1, member
        last = self.commits[-1] if self.commits else None
        member.take(self.epoch, Committed(last.offset, last.metadata) if last else None)

    async def _revoke(self) -> None:
        """Take the partition from its owner as a consumer does, which waits for the answer and commits it."""
        drain = asyncio.ensure_future(self.owner.pump.on_revoked([P0], Deadline(self.clock, 5)))
        end = self.clock.time() + PATIENCE_SECONDS
        while not drain.done():
            await self.clock.advance(0.1)
            if self.clock.time() > end:
                drain.cancel()
                raise Stalled
        if P0 in (answer := drain.result()):
            self.owner.commit(answer)

    async def _hit(self, delay_seconds: float = 0.0, failures: float = 0.0) -> None:
        """Let the next delivery be slow, or its first record fail so often, and wait until it has begun."""
        self.aimed_delay_seconds, self.aimed_failures = delay_seconds, failures
        await self._run(lambda: not (self.aimed_delay_seconds or self.aimed_failures))

    async def _run(self, until: Callable[[], bool]) -> None:
        end = self.clock.time() + PATIENCE_SECONDS
        while not until():
            self.owner.feed(self.epoch)
            await self.clock.advance(0.1)
            if self.clock.time() > end:
                raise Stalled


class Stalled(Exception):
    """Nothing has moved for minutes."""


class BadDeploy:
    """A destination that fails all it gets, and a consumer with a replay beside it; half goes elsewhere."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.letters = self.in_flight = self.most = 0
        self.pumps: list[Pump] = []
        delivery = DeliveryConfig(ordering="none", max_in_flight=4, batch=BatchConfig(max_records=1))
        for name in ("live", "replay"):
            beside = self.pumps[0] if self.pumps else None
            pump = Pump(
                name, "g", self, self, delivery=delivery, clock=self.clock, chance=Random(1), shares_with=beside
            )
            pump.connect(self)
            self.pumps.append(pump)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if delivery.records[0].offset % 2:
            return [DELEGATED]
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await self.clock.sleep(0.1)
        finally:
            self.in_flight -= 1
        return [Reply("E", "again")]

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        self.letters += len(letters)

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        """Nothing is held back here."""

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Nobody reads it here."""

    async def play(self) -> set[str]:
        for number, pump in enumerate(self.pumps):
            place = TopicPartition("t", number)
            await pump.start()
            pump.on_assigned({place: 1}, {})
            pump.on_records(place, 1, [Record(*place, offset, 0, None, b"") for offset in range(1000)])
        for _ in range(600):
            await self.clock.advance(1)
        for pump in self.pumps:
            await pump.stop()
        return {*(["bound"] if self.most > 4 else []), *(["spilled"] if self.letters > 20 else [])}


def verdicts(seed: int) -> set[str]:
    """Return the kinds of what the ledger finds when the story is played, and what a bad deploy did."""

    async def play() -> list[str]:
        world = World(seed)
        # What waits with a limit waits by the same clock; the loop always has something to do, so it never sleeps.
        asyncio.get_running_loop().time = world.clock.monotonic  # type: ignore[method-assign]
        try:
            await world.play()
        except Stalled:
            pass  # the ledger will say how far it came
        finally:
            for member in world.members:
                await member.pump.stop()
        run = Pushed(world.log, world.attempts, world.letters, world.commits)
        return check_pushed(run, "key", world.faults, world.operations)

    return {text.partition(":")[0] for text in asyncio.run(play())} | asyncio.run(BadDeploy().play())


# The sabotages -------------------------------------------------------------------------------------------------------

real_write, real_on_records, real_unblock = Deliverer._write, Pump.on_records, Moves._unblock
real_is_to_blame = Deliverer._is_to_blame
real_delivered, real_on_revoked, real_on_lost, real_take = (
    AckTracker.delivered, Pump.on_revoked, Pump.on_lost, Lane.take,
)  # fmt: skip


async def commit_before_the_letter_is_acknowledged(self: Any, lane: Any, batch: Any) -> None:
    self._on_ended(lane, batch.records, Outcome.DEAD_LETTER, ())
    await real_write(self, lane, self._dead_letters, batch.dead_letters)


async def swallow_the_error_of_a_letter(self: Any, lane: Any, writer: Any, letters: Any) -> Any:
    result = await real_write(self, lane, writer, letters)
    return () if isinstance(result, DeadLetterFailed) else result


def commit_what_was_handed_out(self: Any, partition: Any, epoch: Any, records: Any) -> None:
    real_on_records(self, partition, epoch, records)
    self.source.commit({partition: Committed(records[-1].offset + 1)})


def believe_results_of_another_epoch(self: Any, lanes: Any, why: str = "") -> None:
    """Nothing is fenced and nothing forgotten."""


def commit_what_is_lost(self: Any, partitions: Any) -> None:
    commits = {partition: self.lanes[partition].tracker.commit for partition in partitions}
    real_on_lost(self, partitions)
    self.source.commit(commits)


def let_the_next_success_pass_a_failure(self: Any) -> Committed | None:
    last = self._status.rfind(1)
    return Committed(self._offsets[last] + 1) if last >= 0 else None


def wait_for_the_next_number(self: Any, offsets: Any) -> Any:
    after = self._offsets[-1] + 1 if self._offsets else offsets[0]
    return real_delivered(self, range(after, offsets[-1] + 1))


async def fence_first_and_drain_second(self: Any, partitions: Any, deadline: Any) -> Any:
    self._fence([self.lanes[partition] for partition in partitions])
    return await real_on_revoked(self, partitions, deadline)


async def wait_without_limit(self: Any, partitions: Any, deadline: Any) -> Any:
    return await real_on_revoked(self, partitions, Deadline(self._context.clock, 1e9))


def let_go_of_a_key_when_it_begins(self: Any) -> Any:
    batch = real_take(self)
    self.ended(batch.records)
    return batch


async def skip_the_one_beside_it_too(self: Any, lane: Any, record: Any) -> None:
    await real_unblock(self, lane, record)
    last = (lane.tracker.position or 0) - 1
    mate = next(offset for offset in range(last, record.offset, -1) if lane.tracker.is_open(offset))
    lane.tracker.done([mate], lane.tracker.epoch)


async def drain_for_a_skip_and_not_seek(self: Any, lane: Any, records: Any, answer: Any) -> None:
    """What was delivered with a skipped record is not delivered again."""


def begin_though_it_is_held(self: Any) -> None:
    """No lane is told of a hold."""


def trust_for_what_was_delegated(self: Any, lane: Any, batch: Any, attempt: int, judged: Any, replies: Any) -> bool:
    if delegated := judged.get(Outcome.DELEGATED):
        self._context.breaker.answered(attempt, len(delegated))
    return real_is_to_blame(self, lane, batch, attempt, judged, replies)


def limit_each_pump_for_itself(self: Any, user: Any) -> int:
    return self.concurrency - user.in_flight


SABOTAGES: list[tuple[str, list[tuple[type, str]], Any]] = [
    ("ahead", [(Deliverer, "_write_dead_letters")], commit_before_the_letter_is_acknowledged),
    ("lost", [(Deliverer, "_write")], swallow_the_error_of_a_letter),
    ("ahead", [(Pump, "on_records")], commit_what_was_handed_out),
    ("back", [(Pump, "_fence"), (Pump, "_forget")], believe_results_of_another_epoch),
    ("back", [(Pump, "on_lost")], commit_what_is_lost),
    ("ahead", [(AckTracker, "commit")], let_the_next_success_pass_a_failure),
    ("behind", [(AckTracker, "delivered")], wait_for_the_next_number),
    ("repeat", [(Pump, "on_revoked")], fence_first_and_drain_second),
    ("behind", [(Pump, "on_revoked")], wait_without_limit),
    ("order", [(Lane, "take")], let_go_of_a_key_when_it_begins),
    ("skipped", [(Moves, "_unblock")], skip_the_one_beside_it_too),
    ("behind", [(Moves, "_skip")], drain_for_a_skip_and_not_seek),
    ("paused", [(Pump, "apply_pauses")], begin_though_it_is_held),
    ("spilled", [(Deliverer, "_is_to_blame")], trust_for_what_was_delegated),
    ("bound", [(AdaptiveLimit, "free_for")], limit_each_pump_for_itself),
]
"""The verdict that catches it, what is replaced, and by what."""


@pytest.mark.parametrize(("verdict", "places", "broken"), SABOTAGES, ids=[row[2].__name__ for row in SABOTAGES])
def test_each_sabotage_is_caught(
    verdict: str, places: list[tuple[type, str]], broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of the delivery core is broken, and the ledger says what that does."""
    for kind, name in places:
        monkeypatch.setattr(kind, name, property(broken) if name == "commit" else broken)
    for seed in range(2):
        assert verdict in verdicts(seed)


def test_what_is_whole_is_clean() -> None:
    """The same story, and nothing to be said."""
    for seed in range(5):
        assert verdicts(seed) == set()
