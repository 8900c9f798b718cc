"""The breaker against what it promises, in virtual time, whatever deliveries do and whenever they come back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.breaker import Breaker
from headrace.records import TopicPartition
from headrace_devkit.testing import ManualClock

FREE, LONGEST, LONGEST_WISH = 10, 10, 300
PLACES = 4
WISHES = st.sampled_from([None, None, None, 0.0, -3.0, math.nan, 2.0, 60.0, 3.2e8])
WHICH = st.integers(0, 1000)


class Timers:
    """A clock, and what it calls when; time moves only by `advance`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.set = 0

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.set += 1
        heapq.heappush(self.due, (self.clock.monotonic() + seconds, self.set, call))

    def advance(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while self.due and self.due[0][0] <= end:
            self.clock._now, _, call = heapq.heappop(self.due)
            call()
        self.clock._now = end


class BreakerMachine(RuleBasedStateMachine):
    """Begins deliveries whenever it may, and lets each end in any way at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = self.last_turn = 0
        self.timers = Timers()
        delivery = DeliveryConfig(
            max_in_flight=PLACES,
            batch=BatchConfig(max_records=1),
            retry=RetryConfig(first_delay_seconds=0.5, max_delay_seconds=30),
        )
        self.breaker = Breaker("b", delivery, self.timers.clock, Random(3), self.timers.later, self._woken)
        self.under_way: dict[int, bool] = {}
        """Tickets; whether it began as a probe."""
        self.not_before = self.by = 0.0
        """When the destination wants to be asked again at the earliest, and when it must be, if nobody is asking."""
        self.doubted = 0
        self.newest = self.seen_alive = 0
        """The ticket taken last, and the one that was it when a record ended well last."""
        self.wakes = 0

    def _woken(self) -> None:
        self.wakes += 1
        assert self.breaker.admits

    @property
    def now(self) -> float:
        return self.timers.clock.monotonic()

    @property
    def closed(self) -> bool:
        return not self.breaker.waits_for

    @precondition(lambda self: self.breaker.admits and len(self.under_way) < self.breaker.limit.concurrency)
    @rule()
    def begin(self) -> None:
        assert self.now >= self.not_before, "earlier than the destination asked for"
        probes = not self.closed
        ticket = self.breaker.limit.take(self)
        assert not self.breaker.stops(ticket)
        self.under_way[ticket] = probes
        self.newest = ticket
        if probes:
            assert list(self.under_way.values()).count(True) == 1
            assert not self.breaker.admits, "one delivery at a time tries"

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH, wish=WISHES)
    def refuse(self, which: int, wish: float | None) -> None:
        ticket = self._one(which)
        was_closed, probes = self.closed, self.under_way[ticket]
        to_blame = self.breaker.refused(ticket, "HTTP 503", wish)
        wait = min(wish, LONGEST_WISH) if wish and wish > 0 else 0
        if to_blame:
            assert not self.closed
            self.not_before = max(self.not_before, self.now + wait)
            if was_closed or probes:
                assert not self.breaker.admits
                self.by = max(self.not_before, self.now + LONGEST)
            self.by = max(self.by, self.not_before)
        else:
            assert self.closed
            assert not wait
            assert ticket <= self.seen_alive, "nothing has succeeded since, so nothing speaks for the destination"
        self._leave(ticket)

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH, ended=st.sampled_from([0, 0, 0, 1, 1, 5, 100]), failed=st.sampled_from([0, 0, 1, 1, 3, 30]))
    def answer(self, which: int, ended: int, failed: int) -> None:
        ticket = self._one(which)
        was_closed, probes = self.closed, self.under_way[ticket]
        doubts = [(TopicPartition("t", 0), self.doubted + n, 1) for n in range(failed)]
        self.doubted += failed
        self.seen_alive = self.newest if ended else self.seen_alive
        if self.breaker.answered(ticket, ended, doubts, "E"):
            assert failed <= ended + FREE + 1, "records are blamed, and almost none went well"
            if probes:
                assert self.closed or self.now < self.not_before
        else:
            assert self.doubted > FREE, "a few records are enough to blame the destination"
            assert not self.closed
            if was_closed or probes:
                self.by = max(self.not_before, self.now + LONGEST)
        self._end(ticket, answered=True)

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH)
    def vanish(self, which: int) -> None:
        """A delivery whose partition is lost ends without a word."""
        self._leave(self._one(which))

    @rule(seconds=st.sampled_from([0.05, 1.0, 5.0, 12.0]))
    def pass_time(self, seconds: float) -> None:
        self.timers.advance(seconds)

    @invariant()
    def it_lives(self) -> None:
        assert 1 <= self.breaker.limit.concurrency <= PLACES
        assert self.breaker.limit.in_flight == len(self.under_way)
        if not any(self.under_way.values()) and self.now >= self.by:
            assert self.breaker.admits, "nobody tries, and nobody may"
        for ticket, probes in self.under_way.items():
            assert self.breaker.stops(ticket) == (not self.closed and not probes)

    def teardown(self) -> None:
        """A destination that is back is found out in time, and closes the breaker."""
        for ticket in list(self.under_way):
            self._leave(ticket)
        self.timers.advance(LONGEST + LONGEST_WISH)
        assert self.breaker.admits
        ticket = self.breaker.limit.take(self)
        assert self.breaker.answered(ticket, 1)
        self.breaker.limit.release(self, answered=True)
        assert self.closed

    def _one(self, which: int) -> int:
        return sorted(self.under_way)[which % len(self.under_way)]

    def _leave(self, ticket: int) -> None:
        self._end(ticket, answered=False)
        self.breaker.leave(ticket)

    def _end(self, ticket: int, *, answered: bool) -> None:
        self.breaker.limit.release(self, answered=answered)
        # A probe that became an ordinary delivery, because the breaker closed, is none any more.
        del self.under_way[ticket]


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=3 * settings().max_examples, stateful_step_count=30)


def test_a_probe_that_is_answered_in_a_requested_pause_does_not_keep_its_turn() -> None:
    """Another delivery was told to wait while it tried: the breaker stays open, and then the next one tries."""
    machine = BreakerMachine()
    breaker, slots = machine.breaker, machine.breaker.limit
    first, second = slots.take(machine), slots.take(machine)
    breaker.refused(first, "HTTP 503")
    machine.timers.advance(LONGEST)
    probe = slots.take(machine)
    breaker.refused(second, "HTTP 503", LONGEST_WISH)
    assert breaker.answered(probe, 1)
    assert not breaker.admits
    machine.timers.advance(LONGEST_WISH)
    assert breaker.admits
