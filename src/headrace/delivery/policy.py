"""The written policy: what the end of one delivery means for each of its records.

Source: sidecar.md 7.5 and defect 23 (roll-back threshold), delivery.md 4.5 (fatal failures, deadline per record).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.consumers import Action, RetryConfig
from headrace.delivery.batch import Batch
from headrace.delivery.protocols import DeadLetter, Outcome, Verdict
from headrace.records import Record


class Judgement:
    """What becomes of the records of one delivery; each is in exactly one of the lists."""

    __slots__ = ("again", "elsewhere", "ended", "letters", "rolled_back", "skipped", "together", "waiting", "why")

    def __init__(self) -> None:
        self.ended: list[Record] = []
        """Handled."""
        self.elsewhere: list[Record] = []
        """Ended without a delivery."""
        self.skipped: list[Record] = []
        """Ended because the policy says so."""
        self.again: list[Record] = []
        """To be delivered once more, which is their next attempt."""
        self.letters: list[DeadLetter] = []
        """Failed for good."""
        self.waiting: list[Record] = []
        """To be delivered again when the destination, which is to blame, is repaired; no attempt is used up."""
        self.together: list[Record] = []
        """Failed by one answer that blames none of them: to be delivered in two halves; no attempt is used up."""
        self.rolled_back = False
        """Whether so much failed that all of it is to be delivered again."""
        self.why = ""
        """Class of the last failure."""

    def keep(self) -> list[Record]:
        """Take out what is not to blame, since the destination is; what is undeliverable by proof stays a letter."""
        doubtful = [letter.record for letter in self.letters if letter.outcome.verdict is Verdict.RETRY]
        kept = sorted([*self.again, *doubtful], key=lambda record: record.offset)
        self.again = []
        self.letters = [letter for letter in self.letters if letter.outcome.verdict is not Verdict.RETRY]
        return kept


def judge(batch: Batch, outcomes: Sequence[Outcome], retry: RetryConfig, group: str, now: float) -> Judgement:
    """Apply a policy to what a destination said.

    Args:
        batch: What was delivered.
        outcomes: How each record ended, in their order.
        retry: The policy.
        group: Whose dead letters they become.
        now: Seconds since the epoch.
    """
    judged = Judgement()
    first = batch.first_failed_at or now
    late = bool(retry.deadline_seconds) and now - first >= (retry.deadline_seconds or 0)
    as_one = sum(1 for outcome in outcomes if outcome.status is not None) > 1
    for record, outcome in zip(batch.records, outcomes, strict=True):
        if outcome.verdict is Verdict.ACK:
            (judged.ended if outcome.reached else judged.elsewhere).append(record)
            continue
        judged.why = outcome.error
        action = action_of(outcome, retry)
        if action == "unavailable" or outcome.verdict is Verdict.NOT_TAKEN:
            judged.waiting.append(record)
        elif outcome.status is not None and as_one:
            judged.together.append(record)
        elif action == "skip":
            judged.skipped.append(record)
        elif action == "retry" and batch.attempt < retry.attempts and not late:
            judged.again.append(record)
        else:
            if action == "retry" and batch.attempt < retry.attempts:
                outcome = _past_deadline(outcome, now - first, retry)
            judged.letters.append(DeadLetter(record, group, batch.attempt, outcome, first, now))
    return _rolled_back(batch, judged) if _rolls_back(batch, judged, retry) else judged


def action_of(outcome: Outcome, retry: RetryConfig) -> Action:
    """Return what a failure means."""
    if outcome.status is not None:
        return retry.action_of_status(outcome.status)
    return retry.action_of_error(outcome.error, "retry" if outcome.verdict is Verdict.RETRY else "dead_letter")


def _rolls_back(batch: Batch, judged: Judgement, retry: RetryConfig) -> bool:
    """Whether so much failed that the delivery is to be repeated as a whole.

    What has no attempt left, or fails for good, would not get better; so roll-backs end with the attempts.
    """
    above, at = retry.rollback_threshold_percent, retry.rollback_at_percent
    size, failed = len(batch.records) - len(judged.elsewhere), len(judged.again) * 100
    if judged.waiting or not failed or size < retry.rollback_min_records:
        return False
    return failed > above * size if above is not None else at is not None and failed >= at * size


def _rolled_back(batch: Batch, judged: Judgement) -> Judgement:
    whole = Judgement()
    whole.elsewhere = judged.elsewhere
    without = {record.offset for record in judged.elsewhere}
    whole.again = [record for record in batch.records if record.offset not in without]
    whole.rolled_back = True
    whole.why = judged.why
    return whole


def _past_deadline(outcome: Outcome, age_seconds: float, retry: RetryConfig) -> Outcome:
    passed = f"{age_seconds:.1f} s after its first failure, past retry.deadline_seconds ({retry.deadline_seconds:g})"
    return outcome._replace(reason=f"{passed}: {outcome.reason}")
