"""What the end of a delivery means for each of its records, as it is written in the configuration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config.consumers import RetryConfig
from headrace.delivery.batch import Batch
from headrace.delivery.policy import Judgement, judge
from headrace.delivery.protocols import ACK, ELSEWHERE, Outcome, Verdict
from headrace.records import Record

FAILED = Outcome(Verdict.RETRY, "not processed", "why")


def status(code: int) -> Outcome:
    return Outcome(Verdict.RETRY, f"HTTP {code}", "body", code)


def judged(
    *outcomes: Outcome, attempt: int = 1, first_failed_at: float = 0.0, now: float = 100.0, **retry: Any
) -> Judgement:
    records = [Record("t", 0, offset, 0, None, b"v") for offset in range(len(outcomes))]
    batch = Batch(records, attempt, first_failed_at)
    return judge(batch, outcomes, RetryConfig.model_validate(retry), "g", now)


def ends(found: Judgement) -> dict[str, list[int]]:
    lists = {name: getattr(found, name) for name in ("ended", "elsewhere", "skipped", "again", "waiting", "together")}
    lists["letters"] = [letter.record for letter in found.letters]
    return {name: [record.offset for record in records] for name, records in lists.items() if records}


@pytest.mark.parametrize(
    ("codes", "end"),
    [
        ((400, 402, 405, 409, 410, 413, 415, 422, 451), "letters"),
        ((500, 501, 505, 507, 599, 600, 199), "again"),
        ((300, 301, 304, 308, 401, 403, 404, 408, 425, 429, 502, 503, 504), "waiting"),
    ],
)
def test_statuses_that_no_line_names(codes: tuple[int, ...], end: str) -> None:
    """What blames the record ends it, what may pass is retried, what blames the backend waits."""
    for code in codes:
        assert ends(judged(status(code))) == {end: [0]}, code


@pytest.mark.parametrize(
    ("statuses", "code", "end"),
    [
        ({409: "skip"}, 409, "skipped"),
        ({"409": "retry"}, 409, "again"),
        ({"4xx": "retry"}, 409, "again"),
        ({"4xx": "skip", 422: "dead_letter"}, 422, "letters"),
        ({"4xx": "skip"}, 429, "waiting"),
        ({"5xx": "dead_letter"}, 503, "waiting"),
        ({429: "dead_letter"}, 429, "letters"),
        ({500: "unavailable"}, 500, "waiting"),
    ],
)
def test_a_line_for_a_status_wins_over_one_for_its_class(statuses: dict[Any, str], code: int, end: str) -> None:
    """And a line for a class means no status that blames the backend unless it is named itself."""
    assert ends(judged(status(code), statuses=statuses)) == {end: [0]}


@pytest.mark.parametrize(
    ("error", "end"),
    [("ValueError", "letters"), ("app.errors.ValueError", "letters"), ("Gone", "skipped"), ("x.Gone", "waiting")],
)
def test_classes_of_errors(error: str, end: str) -> None:
    """By the full name, or by the last part of it."""
    errors = {"ValueError": "dead_letter", "Gone": "skip", "x.Gone": "unavailable"}
    assert ends(judged(Outcome(Verdict.RETRY, error), errors=errors)) == {end: [0]}


def test_what_cannot_be_decoded_is_a_letter_unless_a_line_names_it() -> None:
    """A verdict for good needs no attempts."""
    bad = Outcome(Verdict.DEAD_LETTER, "DecodeError")
    assert ends(judged(bad)) == {"letters": [0]}
    assert ends(judged(bad, errors={"DecodeError": "skip"})) == {"skipped": [0]}


@pytest.mark.parametrize("code", [400, 409, 500])
def test_one_answer_for_several_records_blames_none_of_them(code: int) -> None:
    """Only alone is a record to blame, whatever the status means; what was not in the request is judged by itself."""
    bad = Outcome(Verdict.DEAD_LETTER, "DecodeError")
    found = judged(status(code), bad, status(code), attempt=5, statuses={409: "skip"})
    assert ends(found) == {"together": [0, 2], "letters": [1]}
    assert ends(judged(status(500), bad)) == {"again": [0], "letters": [1]}


def test_attempts_are_used_up() -> None:
    """The last attempt is followed by a letter that knows the failures."""
    assert ends(judged(FAILED, attempt=2, attempts=3)) == {"again": [0]}
    (letter,) = judged(FAILED, attempt=3, attempts=3, first_failed_at=90.0).letters
    assert (letter.attempts, letter.first_failed_at, letter.last_failed_at, letter.outcome) == (3, 90.0, 100.0, FAILED)


def test_a_deadline_ends_what_has_attempts_left() -> None:
    """It counts from the first failure, and the letter says so."""
    assert ends(judged(FAILED, attempt=2, first_failed_at=91.0, deadline_seconds=10)) == {"again": [0]}
    (letter,) = judged(FAILED, attempt=2, first_failed_at=90.0, deadline_seconds=10).letters
    assert letter.outcome.reason == "10.0 s after its first failure, past retry.deadline_seconds (10): why"
    assert ends(judged(FAILED, attempt=1, deadline_seconds=10)) == {"again": [0]}


@pytest.mark.parametrize(
    ("failed", "size", "percent", "rolls_back"),
    [
        (0, 10, 0, False),
        (1, 10, 0, True),
        (3, 10, 30, False),
        (4, 10, 30, True),
        (10, 10, 99, True),
        (10, 10, 100, False),
        (10, 10, None, False),
        (3, 3, 30, False),
        (2, 4, 30, True),
    ],
)
def test_roll_back(failed: int, size: int, percent: int | None, rolls_back: bool) -> None:
    """More than the percentage; never for an all-good delivery, never for a small one, never at 100."""
    found = judged(*[FAILED] * failed, *[ACK] * (size - failed), rollback_threshold_percent=percent)
    again = list(range(size if rolls_back else failed))
    assert [record.offset for record in found.again] == again
    assert len(found.ended) == size - len(again)


@pytest.mark.parametrize(("failed", "rolls_back"), [(0, False), (1, False), (2, True), (4, True)])
def test_with_the_meaning_of_light_4j_exactly_the_percentage_rolls_back(failed: int, rolls_back: bool) -> None:
    """2 of 4 at 50; our own key means more than that."""
    found = judged(*[FAILED] * failed, *[ACK] * (4 - failed), rollback_at_percent=50)
    assert found.rolled_back == rolls_back
    assert not judged(FAILED, FAILED, ACK, ACK, rollback_threshold_percent=50).rolled_back


def test_roll_backs_end_with_the_attempts() -> None:
    """Then the good ones end and the bad ones are letters: no offset is rolled back for ever."""
    found = judged(FAILED, FAILED, ACK, ACK, attempt=3, attempts=3, rollback_threshold_percent=0)
    assert ends(found) == {"letters": [0, 1], "ended": [2, 3]}


def test_a_roll_back_leaves_out_what_has_ended_without_a_delivery() -> None:
    """A record that waits in a retry topic by now is not delivered from here too, and does not count."""
    found = judged(ACK, ELSEWHERE, FAILED, FAILED, ELSEWHERE, FAILED, rollback_threshold_percent=50)
    assert found.rolled_back
    assert ends(found) == {"again": [0, 2, 3, 5], "elsewhere": [1, 4]}


def test_what_fails_for_good_or_blames_the_backend_rolls_nothing_back() -> None:
    """Repeating the others would not help it."""
    bad, infra = Outcome(Verdict.DEAD_LETTER, "DecodeError"), Outcome(Verdict.RETRY, "Down")
    found = judged(bad, bad, bad, ACK, rollback_threshold_percent=30)
    assert ends(found) == {"letters": [0, 1, 2], "ended": [3]}
    found = judged(FAILED, infra, FAILED, ACK, errors={"Down": "unavailable"}, rollback_threshold_percent=30)
    assert ends(found) == {"again": [0, 2], "waiting": [1], "ended": [3]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rollback_threshold_percent": 101}, "is 101: write a percentage from 0"),
        ({"rollback_threshold_percent": -1}, "is -1: write a percentage from 0"),
        ({"rollback_at_percent": 0}, "greater than or equal to 1"),
        ({"rollback_at_percent": 30, "rollback_threshold_percent": 30}, "exclude each other"),
        ({"rollback_min_records": 0}, "greater than or equal to 1"),
        ({"deadline_seconds": 0}, "greater than 0"),
        ({"statuses": {200: "skip"}}, "names 200, which is no failure"),
        ({"statuses": {"6xx": "skip"}}, "names 6xx, which is no failure"),
        ({"statuses": {409: "ack"}}, "'retry', 'dead_letter', 'skip' or 'unavailable'"),
        ({"errors": {"": "skip"}}, "at least 1 character"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    """When the file is read, in words."""
    with pytest.raises(ValidationError, match=says):
        RetryConfig.model_validate(given)
