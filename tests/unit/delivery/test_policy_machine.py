"""The policy in the pump, against the plainest model of what was promised, in virtual time.

Backends that answer for a delivery as a whole or for each record, failures that a policy ends, skips or blames on the
backend, roll-backs, deadlines, and dead letters that are written in part.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.testing.pump_harness import P0, Harness

ATTEMPTS = 3
WHOLE = {"poison": 500, "flaky": 500, "conflict": 409, "refused": 422}
"""Records that spoil the delivery they are in, and the status of the response; a flaky one does so once."""
ALONE = {"fails": "E", "once": "E", "bad": "a.b.Bad", "gone": "Gone", "sick": "Sick"}
"""Records whose own result is a failure, and its class; of one that fails once, only the first."""
PLANS = ["ok"] * 8 + [*WHOLE, *ALONE]
LETTERS, SKIPS = {"poison", "refused", "fails", "bad"}, {"conflict", "gone"}


class Model(Harness):
    """A source, a backend and a dead letter topic, in memory."""

    def __init__(self, ordering: str, max_records: int, percent: int | None, last_retry: bool) -> None:
        retry = {
            "max_delay_seconds": 4,
            "deadline_seconds": 3600,
            "statuses": {"409": "skip"},
            "errors": {"Bad": "dead_letter", "Gone": "skip", "Sick": "unavailable"},
            "rollback_threshold_percent": percent,
            "last_retry": last_retry,
        }
        super().__init__(ordering=ordering, max_records=max_records, attempts=ATTEMPTS, max_in_flight=3, retry=retry)
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
        """Which letters of a write are not taken: `half` of them, or `all`."""
        self.wrong: list[str] = []
        self.ordering = ordering
        self.rolls_back = percent is not None
        self.last_retry = last_retry
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
            if outcome is not ACK:
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
        return ACK

    def _check(self, delivery: Delivery) -> None:
        offsets = [record.offset for record in delivery.records]
        if delivery.attempt > ATTEMPTS:
            self.wrong.append(f"{offsets}: attempt {delivery.attempt}")
        if not self.rolls_back:
            for offset in offsets:
                if not 0 <= 1 + self.blamed[offset] - delivery.attempt <= self.excused[offset]:
                    self.wrong.append(f"{offset}: attempt {delivery.attempt}, blamed {self.blamed[offset]} times")
        over = self.handled | set(self.letters) | {o for o, plan in self.plans.items() if plan in SKIPS}
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

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        await asyncio.sleep(0)
        written = {"": len(letters), "half": len(letters) // 2, "all": 0}[self.unwritten]
        self.letters += [letter.record.offset for letter in letters[:written]]
        if written < len(letters):
            raise DeadLetterFailed("down", missing=list(range(written, len(letters))))

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.committed = offsets[P0].offset
        over = self.handled | set(self.letters)
        for offset in range(self.committed):
            plan = self.plans[offset]
            if offset not in over and plan not in SKIPS and not (self.last_retry and plan in LETTERS):
                self.wrong.append(f"{self.committed} is committed, {offset} has not ended")


class PolicyMachine(RuleBasedStateMachine):
    """Drives a model."""

    @initialize(
        ordering=st.sampled_from(["partition", "key", "none"]),
        max_records=st.sampled_from([1, 4, 9]),
        percent=st.sampled_from([None, None, 0, 40, 100]),
        last_retry=st.booleans(),
    )
    def open(self, ordering: str, max_records: int, percent: int | None, last_retry: bool) -> None:
        self.runner = asyncio.Runner()
        self.runner.run(self._open(ordering, max_records, percent, last_retry))

    async def _open(self, ordering: str, max_records: int, percent: int | None, last_retry: bool) -> None:
        self.model = Model(ordering, max_records, percent, last_retry)
        await self.model.pump.start()
        self.model.pump.on_assigned({P0: 1}, {})

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 9))
    def arrive(self, seed: int, count: int) -> None:
        self.runner.run(self._arrive(Random(seed), count))

    async def _arrive(self, chance: Random, count: int) -> None:
        model, first = self.model, len(self.model.log)
        news = [Record("t", 0, first + n, 0, chance.choice([b"a", b"b", b"c", b"d"]), None) for n in range(count)]
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

    @invariant()
    def nothing_went_wrong(self) -> None:
        if model := getattr(self, "model", None):
            assert model.wrong == []
            assert model.pump.death is None

    def teardown(self) -> None:
        """Once everything works again, every record ends, once, and as its plan says."""
        if not hasattr(self, "model"):
            return
        try:
            self.runner.run(self._heal())
            self.nothing_went_wrong()
            self._check_ends()
        finally:
            self.runner.close()

    async def _heal(self) -> None:
        self.model.down = self.model.sick = False
        self.model.unwritten = ""
        await self.model.clock.advance(40 * len(self.model.log) + 60)
        await self.model.pump.stop()

    def _check_ends(self) -> None:
        model, counts = self.model, self.model.pump.numbers()
        plans = Counter(model.plans.values())
        failed, skipped = sum(plans[plan] for plan in LETTERS), sum(plans[plan] for plan in SKIPS)
        last = model.last_retry
        assert (counts["dead_letters"], counts["given_up"]) == ((0, failed) if last else (failed, 0))
        assert counts["skipped"] == skipped
        assert counts["delivered"] == len(model.log) - failed - skipped == len(model.handled)
        assert sorted(model.letters) == ([] if last else [o for o, plan in model.plans.items() if plan in LETTERS])
        assert model.committed == model.released == len(model.log)
        assert all(count <= ATTEMPTS + model.excused[offset] for offset, count in model.blamed.items())


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=3 * settings().max_examples // 2, stateful_step_count=10)
