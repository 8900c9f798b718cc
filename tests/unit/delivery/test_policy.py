"""What the end of a delivery means for each of its records, as the configuration defines it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import ACK, FILTERED, HANDED_OFF, Outcome, Reply
from headrace.delivery.policy import Judged, judge
from headrace.records import Record
from yaml_table import table

FAILED = Reply("not processed", "why")
REPLIES = {
    "ok": ACK,
    "handed off": HANDED_OFF,
    "filtered": FILTERED,
    "failed": FAILED,
    "bad": Reply("DecodeError", permanent=True),
}


def judged(*replies: Reply, attempt: int = 1, **retry: Any) -> Judged:
    records = [Record("t", 0, offset, 0, None, b"v") for offset in range(len(replies))]
    policy = RetryConfig.model_validate(retry)
    return judge(records, replies, policy, attempt=attempt)


def reply_of(name: str | int) -> Reply:
    """Return a reply by its name, or one with a status, or with the class of an error."""
    return Reply(f"HTTP {name}", "body", name) if isinstance(name, int) else REPLIES.get(name) or Reply(name)


@pytest.mark.parametrize(("replies", "policy", "ends"), table(__file__, "outcomes"))
def test_the_outcome_of_each_record(replies: list[str | int], policy: dict[str, Any], ends: dict[str, Any]) -> None:
    """By the status, the class of the error and the number of attempts."""
    found = judged(*map(reply_of, replies), **policy)
    assert {outcome: [record.offset for record, _ in both] for outcome, both in found.items()} == ends


@pytest.mark.parametrize(("codes", "end"), table(__file__, "statuses"))
def test_statuses_that_the_policy_does_not_name(codes: list[int], end: str) -> None:
    """A fault of the record completes it, a temporary failure is retried, a fault of the backend waits."""
    assert {code: [*judged(reply_of(code))] for code in codes} == {code: [end] for code in codes}


@pytest.mark.parametrize(("failed", "size", "percent", "rolls_back"), table(__file__, "roll_back"))
def test_roll_back(failed: int, size: int, percent: int | None, rolls_back: bool) -> None:
    """More than the percentage; never for an all-good delivery, never for a small one, never at 100."""
    found = judged(*[FAILED] * failed, *[ACK] * (size - failed), rollback_threshold_percent=percent)
    again = list(range(size if rolls_back else failed))
    outcome = Outcome.ROLL_BACK if rolls_back else Outcome.RETRY
    assert [record.offset for record, _ in found.get(outcome, ())] == again
    assert len(found.get(Outcome.DELIVERED, ())) == size - len(again)
