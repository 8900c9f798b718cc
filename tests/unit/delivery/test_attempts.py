"""The policy at work in the pump: how many deliveries it takes, and what the log says."""

from typing import Any

import pytest

from headrace.delivery.outcomes import Reply
from headrace.errors import DeadLetterFailed
from headrace.records import Committed
from headrace.runtime import Deadline
from headrace_devkit.testing.pump_harness import P0, RETRY, Harness, running


@pytest.mark.parametrize(
    ("retry", "reply", "said"),
    [
        ({"statuses": {"409": "skip"}}, Reply("HTTP 409", "", 409), "skipped=1 by policy: HTTP 409"),
        ({"last_retry": True}, RETRY, "dropped offset 1 after 3 attempts (E); retry.last_retry is on"),
    ],
)
async def test_records_completed_without_a_dead_letter_are_logged(
    retry: dict[str, Any], reply: Reply, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No topic has the record then, so the log names it and the policy."""
    caplog.set_level("INFO")
    async with running(Harness(max_records=1, retry=retry)) as harness:
        harness.responses = {1: reply}
        harness.feed(0, 1, 2)
        await harness.clock.advance(60)
        assert (harness.dead_letters.offsets, harness.pump.numbers()["delivered"]) == ([], 2)
    assert any(said in message for message in caplog.messages)


async def test_a_failed_write_of_dead_letters_is_logged_once_and_repeats_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not logged with every retry, and dead letters that were written are not written again."""
    async with running(Harness(attempts=1, max_records=3)) as harness:
        harness.responses = dict.fromkeys(range(3), RETRY)
        failing = [[0, 2]]

        async def write(letters: Any) -> None:
            if not failing:
                raise DeadLetterFailed("no room", missing=[0])
            harness.dead_letters.offsets += failing.pop()
            raise DeadLetterFailed("no room", missing=[1])

        topic = harness.dead_letters
        whole, topic.write = topic.write, write  # type: ignore[method-assign]
        harness.feed(0, 1, 2)
        await harness.clock.settle()
        await harness.clock.advance(60)
        said = [message for message in caplog.messages if "no room" in message]
        assert said == [
            "group g, t-0 is waiting, so that no record is lost: no room",
            "group g, t-0 is stalled: no room",
        ]
        assert harness.source.commits[P0].offset == 1
        topic.write = whole  # type: ignore[method-assign]
        await harness.clock.advance(10)
        assert (harness.dead_letters.offsets, harness.source.commits[P0]) == ([0, 2, 1], Committed(3))


async def test_attempts_of_a_record_before_a_reset_are_not_those_of_another() -> None:
    """They count only for the offset that was committed with them."""
    async with running(Harness(attempts=5)) as harness:
        harness.responses[0] = RETRY
        harness.feed(0)
        await harness.clock.advance(1.5)
        at = (await harness.pump.on_revoked([P0], Deadline(harness.clock, 1)))[P0]
        assert at.metadata
        harness.pump.on_assigned({P0: 3}, {P0: at._replace(offset=1)})
        harness.feed(1)
        await harness.clock.settle()
        assert harness.deliveries[-1].attempt == 1
