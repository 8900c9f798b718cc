"""What the end of a delivery means for each of its records, as it is written in the configuration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from yaml_table import table

from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import ACK, HANDED_OFF, Outcome, Reply
from headrace.delivery.policy import Judged, judge
from headrace.records import Record

FAILED = Reply("not processed", "why")


def status(code: int) -> Reply:
    return Reply(f"HTTP {code}", "body", code)


def judged(*replies: Reply, attempt: int = 1, age_seconds: float = 0.0, **retry: Any) -> Judged:
    records = [Record("t", 0, offset, 0, None, b"v") for offset in range(len(replies))]
    policy = RetryConfig.model_validate(retry)
    return judge(records, replies, policy, attempt=attempt, age_seconds=age_seconds)


def ends(found: Judged) -> dict[str, list[int]]:
    return {outcome: [record.offset for record, _ in both] for outcome, both in found.items()}


@pytest.mark.parametrize(("codes", "end"), table(__file__, "statuses_that_no_line_names"))
def test_statuses_that_no_line_names(codes: list[int], end: str) -> None:
    """A fault of the record completes it, a temporary failure is retried, a fault of the backend waits."""
    for code in codes:
        assert ends(judged(status(code))) == {end: [0]}, code


@pytest.mark.parametrize(
    ("statuses", "code", "end"),
    [
        ({409: "skip"}, 409, "skipped"),
        ({"409": "retry"}, 409, "retry"),
        ({"4xx": "retry"}, 409, "retry"),
        ({"4xx": "skip", 422: "dead_letter"}, 422, "dead letter"),
        ({"4xx": "skip"}, 429, "unavailable"),
        ({"5xx": "dead_letter"}, 503, "unavailable"),
        ({429: "dead_letter"}, 429, "dead letter"),
        ({500: "unavailable"}, 500, "unavailable"),
    ],
)
def test_a_status_wins_over_its_class(statuses: dict[Any, str], code: int, end: str) -> None:
    """And a class does not include statuses that blame the backend."""
    assert ends(judged(status(code), statuses=statuses)) == {end: [0]}


@pytest.mark.parametrize(("error", "end"), table(__file__, "classes_of_errors"))
def test_classes_of_errors(error: str, end: str) -> None:
    """By the full name, or by the last part of it."""
    errors = {"ValueError": "dead_letter", "Gone": "skip", "x.Gone": "unavailable"}
    assert ends(judged(Reply(error), errors=errors)) == {end: [0]}


def test_a_record_that_cannot_be_decoded_is_a_dead_letter_unless_the_policy_names_it() -> None:
    """A permanent failure needs no attempts."""
    bad = Reply("DecodeError", permanent=True)
    assert ends(judged(bad)) == {"dead letter": [0]}
    assert ends(judged(bad, errors={"DecodeError": "skip"})) == {"skipped": [0]}


@pytest.mark.parametrize("code", [400, 409, 500])
def test_one_response_for_several_records_blames_none_of_them(code: int) -> None:
    """A record is to blame only if it was sent alone; one that was not in the request is judged by itself."""
    bad = Reply("DecodeError", permanent=True)
    found = judged(status(code), bad, status(code), attempt=5, statuses={409: "skip"})
    assert ends(found) == {"split": [0, 2], "dead letter": [1]}
    assert ends(judged(status(500), bad)) == {"retry": [0], "dead letter": [1]}


def test_a_deadline_ends_remaining_attempts() -> None:
    """It counts from the first failure, and the dead letter has that reason."""
    assert ends(judged(FAILED, attempt=2, age_seconds=9.0, deadline_seconds=10)) == {"retry": [0]}
    ((_, reply),) = judged(FAILED, attempt=2, age_seconds=10.0, deadline_seconds=10)[Outcome.DEAD_LETTER]
    assert reply.reason == "10.0 s after its first failure, past retry.deadline_seconds (10): why"
    assert ends(judged(FAILED, attempt=1, deadline_seconds=10)) == {"retry": [0]}


@pytest.mark.parametrize(("failed", "size", "percent", "rolls_back"), table(__file__, "roll_back"))
def test_roll_back(failed: int, size: int, percent: int | None, rolls_back: bool) -> None:
    """More than the percentage; never for an all-good delivery, never for a small one, never at 100."""
    found = judged(*[FAILED] * failed, *[ACK] * (size - failed), rollback_threshold_percent=percent)
    again = list(range(size if rolls_back else failed))
    outcome = Outcome.ROLL_BACK if rolls_back else Outcome.RETRY
    assert [record.offset for record, _ in found.get(outcome, ())] == again
    assert len(found.get(Outcome.DELIVERED, ())) == size - len(again)


def test_a_roll_back_leaves_out_records_that_were_handed_off() -> None:
    """A record that waits in a retry topic is not delivered here, and does not count."""
    found = judged(ACK, HANDED_OFF, FAILED, FAILED, HANDED_OFF, FAILED, rollback_threshold_percent=50)
    assert ends(found) == {"roll back": [0, 2, 3, 5], "handed_off": [1, 4]}


def test_permanent_failures_and_those_of_the_backend_roll_nothing_back() -> None:
    """Repeating the others would not help it."""
    bad, infra = Reply("DecodeError", permanent=True), Reply("Down")
    found = judged(bad, bad, bad, ACK, rollback_threshold_percent=30)
    assert ends(found) == {"dead letter": [0, 1, 2], "delivered": [3]}
    found = judged(FAILED, infra, FAILED, ACK, errors={"Down": "unavailable"}, rollback_threshold_percent=30)
    assert ends(found) == {"retry": [0, 2], "unavailable": [1], "delivered": [3]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rollback_threshold_percent": 101}, "less than or equal to 100"),
        ({"rollback_threshold_percent": -1}, "greater than or equal to 0"),
        ({"deadline_seconds": 0}, "greater than 0"),
        ({"statuses": {200: "skip"}}, "200 is not a failure status"),
        ({"statuses": {"6xx": "skip"}}, "6xx is not a failure status"),
        ({"statuses": {409: "ack"}}, "'retry', 'dead_letter', 'skip' or 'unavailable'"),
        ({"errors": {"": "skip"}}, "at least 1 character"),
    ],
)
def test_an_invalid_policy_is_rejected(given: dict[str, Any], says: str) -> None:
    """When the file is read, in words."""
    with pytest.raises(ValidationError, match=says):
        RetryConfig.model_validate(given)
