"""The retry policy: decides the outcome of each record of a delivery, and how long a retry waits."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from headrace.config.consumers import Action, RetryConfig
from headrace.delivery.outcomes import FILTERED, Outcome, Reply
from headrace.records import Record
from headrace.runtime.chance import Random

_LEAST_ROLLED_BACK = 4
"""Smaller deliveries are never rolled back, so that one bad record in a quiet topic repeats no other record."""
_NOT_SENT = (Outcome.HANDED_OFF, Outcome.FILTERED)
"""Outcomes of records that did not go to the destination."""
Judged = Mapping[Outcome, Sequence[tuple[Record, Reply]]]
"""The records of one delivery by outcome, each with its reply."""


def judge(records: Sequence[Record], replies: Sequence[Reply], retry: RetryConfig, *, attempt: int = 1) -> Judged:
    """Apply a policy to the replies for records, in their order."""
    judged: defaultdict[Outcome, list[tuple[Record, Reply]]] = defaultdict(list)
    failed_as_one = sum(1 for reply in replies if reply.status is not None or reply.shared) > 1
    for record, reply in zip(records, replies, strict=True):
        if not reply.error:
            outcome = Outcome.DELIVERED if reply.reached else Outcome.HANDED_OFF
            outcome = Outcome.AWAITING_ACK if reply.awaiting_ack else outcome
            outcome = Outcome.FILTERED if reply == FILTERED else outcome
        else:
            action = action_of(reply, retry)
            if action == "unavailable":
                outcome = Outcome.UNAVAILABLE
            elif failed_as_one and (reply.status is not None or reply.shared):
                outcome = Outcome.SPLIT
            elif action == "skip":
                outcome = Outcome.SKIPPED
            elif action == "retry" and attempt < retry.attempts:
                outcome = Outcome.RETRY
            else:
                outcome = Outcome.DEAD_LETTER
        judged[outcome].append((record, reply))
    return _rolled_back(judged, records, replies) if _rolls_back(judged, len(records), retry) else judged


def action_of(reply: Reply, retry: RetryConfig) -> Action:
    """Return what the failure in a reply means."""
    if not (reply.reached or reply.permanent):
        return "unavailable"
    if reply.status is not None:
        return retry.action_of_status(reply.status)
    return retry.action_of_error(reply.error, "dead_letter" if reply.permanent else "retry")


def records_of(judged: Sequence[tuple[Record, Reply]]) -> list[Record]:
    """Return the records of judged pairs."""
    return [record for record, _ in judged]


def last_error(replies: Sequence[Reply]) -> str:
    """Return the class of the last failure."""
    return next((reply.error for reply in reversed(replies) if reply.error), "")


def pause_seconds(failures: int, retry: RetryConfig, chance: Random) -> float:
    """Return a pause: exponential, capped, with full jitter.

    Source: "full jitter" of the AWS architecture blog, "Exponential Backoff and Jitter".
    """
    ceiling = ceiling_seconds(failures, retry)
    return chance.uniform(ceiling / 10, ceiling)


def ceiling_seconds(failures: int, retry: RetryConfig) -> float:
    """Return the longest pause after this number of failures."""
    # 2 ** 60 seconds is past any cap; the limit keeps the power from growing without bound.
    return min(retry.max_delay_seconds, retry.first_delay_seconds * 2.0 ** min(failures - 1, 60))


def _rolls_back(judged: Judged, size: int, retry: RetryConfig) -> bool:
    """Whether enough records failed to repeat the delivery as a whole.

    Records that failed for good do not count, because a repetition does not help them. So roll-backs end with the
    attempts.
    """
    above = retry.rollback_threshold_percent
    size -= sum(len(judged.get(outcome, ())) for outcome in _NOT_SENT)
    failed = len(judged.get(Outcome.RETRY, ())) * 100
    if Outcome.UNAVAILABLE in judged or not failed or size < _LEAST_ROLLED_BACK:
        return False
    return above is not None and failed > above * size


def _rolled_back(judged: Judged, records: Sequence[Record], replies: Sequence[Reply]) -> Judged:
    kept = {outcome: judged[outcome] for outcome in _NOT_SENT if judged.get(outcome)}
    completed = {record.offset for pairs in kept.values() for record, _ in pairs}
    both = zip(records, replies, strict=True)
    whole: dict[Outcome, Sequence[tuple[Record, Reply]]] = {
        Outcome.ROLL_BACK: [(record, reply) for record, reply in both if record.offset not in completed]
    }
    return whole | kept
