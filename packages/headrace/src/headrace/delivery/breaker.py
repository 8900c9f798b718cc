"""The circuit breaker of a destination: one state machine for all lanes of its pumps.

It is closed, open for a pause, or half-open while one delivery tries. Then it closes, or opens for a longer pause.
A delivery that the destination does not take uses up no attempt and is kept.

**What is to blame.** The destination is to blame if it requested a pause (`Retry-After`). It is also to blame if it
raised, and no other delivery has succeeded since this one began. If others succeeded, only this delivery is repeated,
after a pause.

A delivery at which the destination closes the connection is suspected. The third time it is split. A record is to blame
if it was alone in flight, and the destination has taken another delivery since the record was suspected.

A destination that answers and fails records costs failure tokens. A record takes one when it fails for the first time.
A delivery that one response fails as a whole takes one, and so does each half of it. Each record that succeeds pays for
one failure, which takes no token if it happens again. So a run of bad records ends while others succeed.

There are ten tokens, and one for each time a full delivery can be halved. While tokens are left, the records are to
blame: they are retried and become dead letters. So a bad record in a quiet topic becomes one after its attempts. When
no token is left, far more has failed than succeeded, as after a bad deploy, and the destination is to blame. The
breaker opens, and nothing is dead-lettered until a delivery succeeds.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from headrace.config.consumers import DeliveryConfig
from headrace.delivery.limit import AdaptiveLimit
from headrace.delivery.outcomes import Outcome, Reply
from headrace.delivery.policy import Judged, ceiling_seconds
from headrace.records import RecordBatch, TopicPartition
from headrace.runtime import Clock
from headrace.runtime.chance import Random

log = logging.getLogger(__name__)

Failure = tuple[TopicPartition, int, int]
"""A first failure: the partition, the first offset, and how many records one response failed. It takes one token."""
_FREE_TOKENS = 10
_MOST_PAID = 10_000
_LONGEST_PAUSE_SECONDS, _WIDEST_JITTER_SECONDS = 10.0, 5.0
"""A destination that stays down is tried every five seconds at most. Once it is back, it is used within ten seconds."""
_LONGEST_RETRY_AFTER_SECONDS = 300.0
"""Longest pause that a destination may request."""
_STALLED_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class BreakerStatus(NamedTuple):
    """Whether the destination gets deliveries."""

    state: Literal["closed", "open", "half-open"]
    until: float | None
    """Until when it is open; seconds since the epoch."""
    why: str
    """Why it is not closed, in one sentence; empty if it is."""


@dataclasses.dataclass(slots=True)
class _Outage:
    """From the moment the breaker opens until it is closed again."""

    since: float
    """By the monotonic clock, as `until`."""
    why: str = ""
    failures: int = 1
    """Deliveries that failed."""
    pauses: int = 0
    until: float = 0.0
    is_open: bool = False
    """Whether it is open; otherwise it is half-open."""
    probe: int = 0
    """The id of the attempt that tries the destination; that of the next attempt if none does."""
    is_logged: bool = False


class _FailureTokens:
    """Decides who is to blame for failed records: they are, while tokens are left, and then the destination."""

    def __init__(self, max_records: int) -> None:
        self.resize(max_records)
        self.taken: dict[Failure, None] = {}
        """The failures that no success has paid for; each has taken a token."""
        self._paid: dict[Failure, None] = {}
        """The newest failures for which a success has paid."""

    def resize(self, max_records: int) -> None:
        """Apply the size of a full delivery."""
        self._most = _FREE_TOKENS + max_records.bit_length()

    def settle(self, succeeded: int, failures: Collection[Failure]) -> bool:
        """Count the results of one delivery; return whether the failed records are to blame."""
        self.taken.update(dict.fromkeys(failure for failure in failures if failure not in self._paid))
        for _ in range(min(succeeded, len(self.taken))):
            self._paid[self.taken.popitem()[0]] = None
        while len(self._paid) > _MOST_PAID:
            del self._paid[next(iter(self._paid))]
        # Keep one more than there are tokens; otherwise a destination that is back would have to pay for every failure.
        self._keep(self._most + 1)
        return len(self.taken) <= self._most

    def recover(self) -> None:
        """Release tokens after an outage: at least half are left."""
        self._keep(self._most // 2)

    def _keep(self, count: int) -> None:
        while len(self.taken) > count:
            self.taken.popitem()


class Breaker:
    """Counts the results of deliveries, each known by its attempt id, which `limit` gives with a slot.

    An attempt ends with `answered` or `goes_on`, or else with `leave`.
    """

    def __init__(
        self,
        name: str,
        delivery: DeliveryConfig,
        clock: Clock,
        chance: Random,
        later: Callable[[float, Callable[[], None]], object],
        wake: Callable[[], None],
    ) -> None:
        """Begin closed; `later` calls a function after a number of seconds, `wake` begins deliveries again."""
        # Settings
        self._name = name
        self._retry = delivery.retry
        self._clock = clock
        self._chance = chance
        self._later = later
        self._wake = wake
        # All deliveries
        self.limit = AdaptiveLimit(delivery.max_in_flight)
        self._tokens = _FailureTokens(delivery.batch.max_records)
        self._alive = 0
        """The newest id at the time of the last success."""
        # This outage
        self._outage: _Outage | None = None
        """None while it is closed."""

    def has_taken_since(self, attempt_id: int) -> bool:
        """Return whether a record succeeded after a later attempt than this one had begun."""
        return self._alive > attempt_id

    @property
    def admits(self) -> bool:
        """Whether a delivery may begin now."""
        outage = self._outage
        return outage is None or (not outage.is_open and self.limit.newest < outage.probe)

    @property
    def waits_for(self) -> str:
        """Why nothing is delivered, in one sentence; empty while it is."""
        outage = self._outage
        if outage is None:
            return ""
        clock_time = datetime.fromtimestamp(self._until(outage), UTC)
        now = f"open until {clock_time:%H:%M:%S} UTC" if outage.is_open else "trying one delivery"
        return f"the breaker of {self._name} is {now} after {outage.failures} failures: {outage.why}"

    @property
    def status(self) -> BreakerStatus:
        """Whether it is open, and until when."""
        outage = self._outage
        if outage is None:
            return BreakerStatus("closed", None, "")
        state: Literal["open", "half-open"] = "open" if outage.is_open else "half-open"
        return BreakerStatus(state, self._until(outage), self.waits_for)

    @property
    def stalled(self) -> str:
        """The text of `waits_for`, once it has not been closed for a while."""
        outage = self._outage
        is_old = outage and self._clock.monotonic() - outage.since >= _STALLED_SECONDS
        return self.waits_for if is_old else ""

    def resize(self, max_records: int) -> None:
        """Apply the size of a full delivery."""
        self._tokens.resize(max_records)

    def stops(self, attempt_id: int) -> bool:
        """Whether an attempt must not begin, because the breaker opened after the attempt got its id."""
        return self._outage is not None and attempt_id != self._outage.probe

    def leave(self, attempt_id: int) -> None:
        """Record that an attempt is over: if it tried the destination, the next one tries."""
        outage = self._outage
        if outage and attempt_id == outage.probe:
            outage.probe = self.limit.newest + 1
            if not outage.is_open:
                self._try(outage)

    def refused(self, attempt_id: int, why: str, wait_seconds: float | None = None) -> bool:
        """Record that the destination did not take a delivery; it may have requested a pause.

        Return whether the destination is to blame; if not, only this delivery should pause.
        """
        outage, wait = self._outage, 0.0
        if wait_seconds and wait_seconds > 0:
            wait = min(wait_seconds, _LONGEST_RETRY_AFTER_SECONDS)
        if not (outage and attempt_id == outage.probe):
            self.limit.cut(attempt_id)
        if not outage and not wait and attempt_id <= self._alive:
            return False
        if not self._blame(attempt_id, why, wait) and wait and outage:
            self._pause(outage, wait)
        return True

    def answered(self, attempt_id: int, succeeded: int, failures: Collection[Failure] = (), why: str = "") -> bool:
        """Record that the destination answered; a repeated failure, as after a rebalance, takes no new token.

        Return whether the failed records are to blame; if not, keep them as they are.
        """
        outage = self._outage
        if succeeded:
            self._alive = self.limit.newest
        if not (outage or self._tokens.taken or failures):
            return True
        if not self._tokens.settle(succeeded, failures):
            self._blame(attempt_id, f"nearly all deliveries fail, the last with {why}")
            self.leave(attempt_id)
            return False
        if outage and attempt_id == outage.probe and not outage.is_open:
            self._close(outage)
        self.leave(attempt_id)
        return True

    @property
    def is_calm(self) -> bool:
        """Whether nothing has failed lately."""
        return not (self._outage or self._tokens.taken)

    def goes_on(self) -> int:
        """Record that an attempt succeeded while it is calm; return the id of the next one in the same slot."""
        self._alive = self.limit.newest
        return self.limit.keep()

    def _until(self, outage: _Outage) -> float:
        """Return when the pause ends, in seconds since the epoch."""
        return self._clock.time() + outage.until - self._clock.monotonic()

    def _blame(self, attempt_id: int, why: str, wait_seconds: float = 0.0) -> bool:
        """Count a failed delivery, and open if it is the first one or the probe; return whether it opened."""
        outage = self._outage
        if outage is None:
            outage = self._outage = _Outage(self._clock.monotonic(), probe=self.limit.newest + 1)
        else:
            outage.failures += 1
            if attempt_id != outage.probe:
                return False
        outage.pauses += 1
        outage.why = why
        longest = min(ceiling_seconds(outage.pauses, self._retry), _LONGEST_PAUSE_SECONDS)
        pause = self._chance.uniform(max(longest / 10, longest - _WIDEST_JITTER_SECONDS), longest)
        self._pause(outage, max(pause, wait_seconds))
        if self.stalled and not outage.is_logged:
            outage.is_logged = True
            log.warning("%s", self.waits_for)
        return True

    def _close(self, outage: _Outage) -> None:
        self._outage = None
        self._tokens.recover()
        if outage.is_logged:
            log.info("the breaker of %s is closed again", self._name)
        self._wake()

    def _pause(self, outage: _Outage, seconds: float) -> None:
        outage.until = max(outage.until, self._clock.monotonic() + seconds)
        if not outage.is_open:
            outage.is_open = True
            self._later(seconds, lambda: self._pause_over(outage))

    def _pause_over(self, outage: _Outage) -> None:
        left = outage.until - self._clock.monotonic()
        if left > 0:
            self._later(left, lambda: self._pause_over(outage))
        else:
            outage.is_open = False
            if self.limit.newest < outage.probe:
                self._try(outage)

    def _try(self, outage: _Outage) -> None:
        self._wake()
        self._look(outage)

    def _look(self, outage: _Outage) -> None:
        """Close if no record is left that could try the destination, as after a skip; otherwise check again later."""
        if outage is self._outage and self.admits:
            if self.limit.has_records:
                self._later(_LOOK_SECONDS, lambda: self._look(outage))
            else:
                self._close(outage)


def failures_of(records: RecordBatch, judged: Judged, replies: Sequence[Reply]) -> list[Failure]:
    """Return first failures that count against the destination; records that it never received do not."""
    partition = records.topic_partition
    if split := judged.get(Outcome.SPLIT):
        return [(partition, split[0][0].offset, len(split))]
    skipped = {record.offset for record, _ in judged.get(Outcome.SKIPPED, ())}
    failed = [r for r, reply in zip(records, replies, strict=True) if reply.error and not reply.permanent]
    return [(partition, record.offset, 1) for record in failed if record.offset not in skipped]
