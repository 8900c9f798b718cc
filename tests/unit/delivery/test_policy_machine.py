"""The policy in the pump, against the plainest model of what was promised, in virtual time.

Backends that answer for a delivery as a whole or for each record, failures that a policy ends, skips or blames on the
backend, roll-backs, deadlines, retry topics, and dead letters that are written in part. `on_completed` of the pump
reports each record that was completed here, once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from headrace.delivery.outcomes import ACK, HANDED_OFF, DeadLetter, Delivery, Outcome, Reply
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace_devkit.testing.pump_harness import P0, Harness
from tests.unit.delivery.loop_machine import LoopMachine, in_loop

ATTEMPTS = 3
WHOLE = {"poison": 500, "flaky": 500, "conflict": 409, "refused": 422}
"""Records that spoil the delivery they are in, and the status of the response; a flaky one does so once."""
ALONE = {"fails": "E", "once": "E", "bad": "a.b.Bad", "gone": "Gone", "sick": "Sick"}
"""Records whose own result is a failure, and its class; of one that fails once, only the first."""
PLANS = ["ok"] * 8 + [*WHOLE, *ALONE, "handed off"]
LETTERS, SKIPS = {"poison", "refused", "fails", "bad"}, {"conflict", "gone"}


class Model(Harness):
    """A source, a backend and a dead letter topic, in memory."""

    def __init__(self, ordering: str, max_records: int, percent: int | None, last_retry: bool) -> None:
        retry = {
            "max_delay_seconds": 4,
            "statuses": {"409": "skip"},
            "errors": {"Bad": "dead_letter", "Gone": "skip", "Sick": "unavailable"},
            "rollback_threshold_percent": percent,
            "last_retry": last_retry,
        }
        hooks = {"on_completed": self.on_completed, "replay": "job"}
        limits = {"max_records": max_records, "attempts": ATTEMPTS, "max_in_flight": 3}
        super().__init__(ordering=ordering, retry=retry, hooks=hooks, **limits)
        self.reported: dict[int, Outcome] = {}
        self.delayed: set[int] = set()
        """Records that are in a retry topic: of one whole write each fifth."""
        self.log: list[Record] = []
        self.plans: dict[int, str] = {}
        self.blamed: Counter[int] = Counter()
        self.excused: Counter[int] = Counter()
        """Failures beside one that blames the destination: they may use up no attempt."""
        self.spoiled: Counter[int] = Counter()
        self.handled: set[int] = set()
        self.loose: defaultdict[int, set[int]] = defaultdict(set)
        """Who may pass a record: those that had results of their own together with its failure."""
        self.committed = 0
        self.sick = False
        self.unwritten = ""
        """Which dead letters of a write fail: `half` of them, or `all`."""
        self.wrong: list[str] = []
        self.ordering = ordering
        self.rolls_back = percent is not None
        self.last_retry = last_retry
        self.source.on_commit = self._committed
        self.dead_letters.write = self.write  # type: ignore[method-assign]
        answered = self.pump.breaker.answered
        # Without doubts: when it opens because of them is the matter of the breaker's own machine.
        self.pump.breaker.answered = lambda ticket, ended, *_: answered(ticket, ended)  # type: ignore[method-assign]

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self._check(delivery)
        await asyncio.sleep(0)
        if self.down:
            raise DestinationUnavailable("down")
        records = delivery.records
        for record in records:
            plan = self.plans[record.offset]
            if plan in WHOLE and not (plan == "flaky" and self.spoiled[record.offset]):
                self.spoiled[record.offset] += 1
                if len(records) == 1:
                    self.blamed[record.offset] += 1
                return [Reply("HTTP", "text", WHOLE[plan])] * len(records)
        outcomes = [self._result(record.offset) for record in records]
        for record, outcome in zip(records, outcomes, strict=True):
            if outcome.error:
                self.excused[record.offset] += any(other.error == "Sick" for other in outcomes)
                self.loose[record.offset].update(other.offset for other in records)
        return outcomes

    def _result(self, offset: int) -> Reply:
        plan = self.plans[offset]
        if plan in ALONE and not (plan == "once" and self.blamed[offset]) and not (plan == "sick" and not self.sick):
            if plan != "sick":
                self.blamed[offset] += 1
            return Reply(ALONE[plan], "text")
        self.handled.add(offset)
        return HANDED_OFF if plan == "handed off" else ACK

    def on_completed(
        self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
    ) -> None:
        ended = [record.offset for record in records]
        if replay != "job" or size_bytes != len(records) or len(replies) != (0 if how == "delivered" else len(records)):
            self.wrong.append(f"{ended} are reported with {size_bytes} bytes, {replies} and {replay}")
        if again := [offset for offset in ended if offset in self.reported]:
            self.wrong.append(f"{again} are reported again")
        self.reported.update(dict.fromkeys(ended, how))

    def _check(self, delivery: Delivery) -> None:
        offsets = [record.offset for record in delivery.records]
        if delivery.attempt > ATTEMPTS:
            self.wrong.append(f"{offsets}: attempt {delivery.attempt}")
        if not self.rolls_back:
            for offset in offsets:
                if not 0 <= 1 + self.blamed[offset] - delivery.attempt <= self.excused[offset]:
                    self.wrong.append(f"{offset}: attempt {delivery.attempt}, blamed {self.blamed[offset]} times")
        over = self.handled | set(self.dead_letters.offsets) | {o for o, plan in self.plans.items() if plan in SKIPS}
        if self.last_retry:
            over |= {offset for offset, plan in self.plans.items() if plan in LETTERS}
        for earlier in self.log:
            if earlier.offset in over or self.ordering == "none":
                continue
            behind = {offset for offset in offsets if offset > earlier.offset}
            if self.ordering == "partition" and earlier.offset not in offsets and behind - self.loose[earlier.offset]:
                self.wrong.append(f"{offsets} began before {earlier.offset} had ended")
            passed = [r.offset for r in delivery.records if r.key == earlier.key and r.offset > earlier.offset]
            if self.ordering == "key" and passed:
                self.wrong.append(f"{passed} began before {earlier.offset}, of the same key, had ended")

    async def write(self, letters: Sequence[DeadLetter]) -> Any:
        await asyncio.sleep(0)
        written = {"": len(letters), "half": len(letters) // 2, "all": 0}[self.unwritten]
        self.dead_letters.offsets += [letter.record.offset for letter in letters[:written]]
        if written < len(letters):
            raise DeadLetterFailed("down", missing=list(range(written, len(letters))))
        places = [place for place, letter in enumerate(letters) if letter.record.offset % 5 == 0]
        self.delayed.update(letters[place].record.offset for place in places)
        return places

    def _committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.committed = offsets[P0].offset
        over = self.handled | set(self.dead_letters.offsets)
        for offset in range(self.committed):
            plan = self.plans[offset]
            if offset not in over and plan not in SKIPS and not (self.last_retry and plan in LETTERS):
                self.wrong.append(f"{self.committed} is committed, {offset} has not ended")


class PolicyMachine(LoopMachine):
    """Drives a model."""

    @initialize(
        ordering=st.sampled_from(["partition", "key", "none"]),
        max_records=st.sampled_from([1, 4, 9]),
        percent=st.sampled_from([None, None, 0, 40, 100]),
        last_retry=st.booleans(),
    )
    @in_loop
    async def open(self, ordering: str, max_records: int, percent: int | None, last_retry: bool) -> None:
        self.model = Model(ordering, max_records, percent, last_retry)
        await self.model.pump.start()
        self.model.pump.on_assigned({P0: 1}, {})

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 9))
    @in_loop
    async def arrive(self, seed: int, count: int) -> None:
        chance, model, first = Random(seed), self.model, len(self.model.log)
        keys = [chance.choice([b"a", b"b", b"c", b"d"]) for _ in range(count)]
        news = [Record("t", 0, first + n, 0, key, None, size_bytes=1) for n, key in enumerate(keys)]
        model.log += news
        model.plans.update({record.offset: chance.choice(PLANS) for record in news})
        model.pump.on_records(P0, 1, news)
        await model.clock.settle()

    @rule(seconds=st.sampled_from([0.1, 0.5, 3, 20]))
    def pass_time(self, seconds: float) -> None:
        self.runner.run(self.model.clock.advance(seconds))

    @rule(down=st.booleans(), sick=st.booleans(), unwritten=st.sampled_from(["", "half", "all"]))
    def change(self, down: bool, sick: bool, unwritten: str) -> None:
        self.model.down, self.model.sick, self.model.unwritten = down, sick, unwritten

    async def heal(self) -> None:
        self.model.down = self.model.sick = False
        self.model.unwritten = ""
        await self.model.clock.advance(40 * len(self.model.log) + 60)
        await self.model.pump.stop()

    def check_end(self) -> None:
        """Every record is completed, once, and as its plan says."""
        model, counts = self.model, self.model.pump.numbers()
        plans = Counter(model.plans.values())
        failed, skipped = sum(plans[plan] for plan in LETTERS), sum(plans[plan] for plan in SKIPS)
        last = model.last_retry
        assert counts["dead_letters"] + counts["delayed"] == (0 if last else failed)
        assert (counts["delayed"], counts["discarded"]) == (len(model.delayed), failed if last else 0)
        assert (counts["skipped"], counts["handed_off"]) == (skipped, plans["handed off"])
        assert (
            counts["delivered"]
            == len(model.handled) - plans["handed off"]
            == len(model.log) - failed - skipped - plans["handed off"]
        )
        reported = Counter(model.reported.values())
        names = {
            "delivered": "delivered",
            "dead letter": "dead_letters",
            "skipped": "skipped",
            "discarded": "discarded",
        }
        assert reported == +Counter({how: int(counts[name]) for how, name in names.items()})
        assert sorted(model.dead_letters.offsets) == (
            [] if last else [o for o, plan in model.plans.items() if plan in LETTERS]
        )
        assert model.committed == model.source.released == len(model.log)
        assert all(count <= ATTEMPTS + model.excused[offset] for offset, count in model.blamed.items())


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=3 * settings().max_examples // 2, stateful_step_count=10)
