"""Whether a destination is given anything at all: one state machine for all lanes of a pump, and it never ends.

Closed; open for a pause; half-open, when one delivery tries; then closed, or open for a longer pause. What a
destination does not take uses up no attempt and is kept.

**Who is to blame.** A destination that takes nothing is: it raised, and no other delivery has succeeded since this one
began, or it asked to be left alone (`Retry-After`). When others did succeed, that one delivery is repeated after a
pause of its own. A destination that answers and fails records is doubted: each record adds a doubt when it fails for
the first time, a delivery that one answer fails as a whole adds one, as does each half of it, and each record that
ends well takes one away. Up to a bound, ten and one for each time a full delivery can be halved, the records are to
blame: they are retried and end as dead letters, so a bad record in a quiet topic, with nothing to compare it with, is
one after its attempts. Above it, so much more has failed than gone well that the destination is to blame, as after a
bad deploy: the breaker opens, and until a delivery goes well again nothing is dead-lettered. So doubts are the tokens
of dead letters: ten are free, and every success earns one back. Source: delivery.md 4.5; reliability.md E2, E4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from random import Random
from typing import Literal, NamedTuple

from headrace.config.consumers import DeliveryConfig
from headrace.delivery.limit import AdaptiveLimit
from headrace.delivery.retry import ceiling_seconds
from headrace.lifecycle import Clock
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

Doubt = tuple[TopicPartition, int, int]
"""What failed for the first time: a partition, the first own offset, and how many records one answer failed."""
_FREE_DOUBTS = 10
_LONGEST_PAUSE_SECONDS, _WIDEST_JITTER_SECONDS = 10.0, 5.0
"""So in the long run one that is down is tried every five seconds at most, and used again ten after its return at the
latest (reliability.md E2)."""
_LONGEST_WISH_SECONDS = 300.0
"""A destination may ask to be left alone for so long (reliability.md E4)."""
_SAID_AFTER_SECONDS = 5.0


class BreakerStatus(NamedTuple):
    """Whether the destination is given anything."""

    state: Literal["closed", "open", "half-open"]
    until: float | None
    """Until when it is open; seconds since the epoch."""
    why: str
    """Why it is not closed, in one sentence; empty if it is."""


class Breaker:
    """Counts what becomes of deliveries, each known by its ticket."""

    def __init__(
        self,
        name: str,
        delivery: DeliveryConfig,
        clock: Clock,
        chance: Random,
        later: Callable[[float, Callable[[], None]], object],
        wake: Callable[[], None],
    ) -> None:
        """Begin closed.

        Args:
            name: Whose breaker it is, for people.
            delivery: First and longest pause, and the most deliveries at a time.
            clock: Time.
            chance: Jitter of the pauses.
            later: Calls something after so many seconds.
            wake: Is called when deliveries may begin again.
        """
        self.limit = AdaptiveLimit(delivery.max_in_flight)
        self._name = name
        self._retry = delivery.retry
        self._clock = clock
        self._chance = chance
        self._later = later
        self._wake = wake
        self.resize(delivery.batch.max_records)
        self._doubts: dict[Doubt, None] = {}
        self._tickets = 0
        self._alive = 0  # the ticket that was the newest when something succeeded last
        self._pauses = 0  # since it was closed; 0 means closed
        self._resting = False
        self._until = 0.0
        self._probe = 0
        self._failures = 0
        self._since = 0.0
        self._why = ""
        self._said = False

    @property
    def admits(self) -> bool:
        """Whether a delivery may begin now."""
        return not self._pauses or not (self._resting or self._probe)

    @property
    def waits_for(self) -> str:
        """Why nothing is delivered, in one sentence; empty while it is."""
        if not self._pauses:
            return ""
        clock_time = datetime.fromtimestamp(self._over_at, UTC)
        now = f"open until {clock_time:%H:%M:%S} UTC" if self._resting else "trying one delivery"
        return f"the breaker of {self._name} is {now} after {self._failures} failures: {self._why}"

    @property
    def status(self) -> BreakerStatus:
        """Whether it is open, and until when."""
        if not self._pauses:
            return BreakerStatus("closed", None, "")
        return BreakerStatus("open" if self._resting else "half-open", self._over_at, self.waits_for)

    @property
    def standing(self) -> str:
        """What `waits_for` says, once it has been so for a while."""
        return self.waits_for if self._clock.monotonic() - self._since >= _SAID_AFTER_SECONDS else ""

    def resize(self, max_records: int) -> None:
        """Take note of the size of a full delivery."""
        self._most_doubts = _FREE_DOUBTS + max_records.bit_length()

    def begin(self) -> int:
        """Return the ticket of a delivery that is about to begin; only when `admits`. `leave` must follow."""
        self._tickets += 1
        if self._pauses:
            self._probe = self._tickets
        return self._tickets

    def stops(self, ticket: int) -> bool:
        """Whether the breaker has opened since a ticket was taken: then its delivery must not begin."""
        return self._pauses > 0 and ticket != self._probe

    def leave(self, ticket: int) -> None:
        """Note that a delivery is over, whatever became of it."""
        if ticket == self._probe:
            self._probe = 0
            if not self._resting:
                self._wake()  # it ended without a word, so the next one tries

    def refused(self, ticket: int, why: str, wait_seconds: float | None = None) -> bool:
        """Note that the destination did not take a delivery.

        Args:
            ticket: The delivery's.
            why: What happened, for people.
            wait_seconds: How long the destination asks to be left alone.

        Returns:
            Whether the destination is to blame; else only this delivery should pause.
        """
        probes, wait = ticket == self._probe, 0.0
        if wait_seconds and wait_seconds > 0:
            wait = min(wait_seconds, _LONGEST_WISH_SECONDS)
        if not probes:
            self.limit.cut(ticket, self._tickets)
        if not self._pauses and not wait and ticket <= self._alive:
            return False
        self._failures += 1
        if probes or not self._pauses:
            self._open(why, wait)
        elif wait:
            self._rest(wait)
        return True

    def answered(self, ticket: int, ended: int, doubts: Iterable[Doubt] = (), why: str = "") -> bool:
        """Note that the destination answered.

        Args:
            ticket: The delivery's.
            ended: Records that ended well.
            doubts: What failed for the first time; the same again, as after a rebalance, counts once.
            why: The last failure, for people.

        Returns:
            Whether the failed records are to blame; else they are to be kept as they are.
        """
        if ended:
            self._alive = self._tickets
        self.limit.grow()
        if not (self._pauses or self._doubts or doubts):
            return True
        self._doubts.update(dict.fromkeys(doubts))
        # More than enough doubts count as enough, or one that is back would have to earn back all it ever failed.
        self._keep_doubts(min(len(self._doubts) - ended, self._most_doubts + 1))
        probes = ticket == self._probe
        if len(self._doubts) > self._most_doubts:
            self._failures += 1
            if probes or not self._pauses:
                self._open(f"nearly all that is delivered fails, the last with {why}", 0.0)
            return False
        if probes and not self._resting:
            self._close()
        return True

    @property
    def _over_at(self) -> float:
        return self._clock.time() + self._until - self._clock.monotonic()

    def _keep_doubts(self, count: int) -> None:
        while len(self._doubts) > max(0, count):
            self._doubts.popitem()

    def _open(self, why: str, wait_seconds: float) -> None:
        if not self._pauses:
            self._since = self._clock.monotonic()
        self._pauses += 1
        self._why = why
        longest = min(ceiling_seconds(self._pauses, self._retry), _LONGEST_PAUSE_SECONDS)
        pause = self._chance.uniform(max(longest / 10, longest - _WIDEST_JITTER_SECONDS), longest)
        self._rest(max(pause, wait_seconds))
        if self.standing and not self._said:
            self._said = True
            log.warning("%s", self.waits_for)

    def _close(self) -> None:
        self._pauses = self._probe = self._failures = 0
        self._keep_doubts(self._most_doubts // 2)
        if self._said:
            self._said = False
            log.info("the breaker of %s is closed again", self._name)
        self._wake()

    def _rest(self, seconds: float) -> None:
        self._until = max(self._until, self._clock.monotonic() + seconds)
        if not self._resting:
            self._resting = True
            self._later(seconds, self._rest_over)

    def _rest_over(self) -> None:
        left = self._until - self._clock.monotonic()
        if left > 0:
            self._later(left, self._rest_over)
        else:
            self._resting = False
            self._wake()
