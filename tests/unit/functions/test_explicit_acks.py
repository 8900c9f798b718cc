"""Explicit acknowledgements between a worker and the parent, and the end of a partition's events in a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.delivery.outcomes import ACK, AWAITING_ACK, NOT_BEGUN, Delivery
from headrace.records import Record, TopicPartition
from headrace.runtime import Deadline
from tests.function_workers import WAITS, Run, Write, acknowledged, called, calls
from yaml_table import table

P = TopicPartition("flights", 3)


def own(mode: str = "explicitOnly") -> dict[str, Any]:
    return {"trigger": {"explicitAckMode": mode}, "workerAllocationMode": "static"}


@pytest.mark.parametrize("code", table(__file__, "handlers_of_every_kind_acknowledge"))
async def test_handlers_of_every_kind_acknowledge(write_function: Write, running: Run, code: str) -> None:
    """Plain ones, asynchronous ones, by a topic of bytes, and tasks in the background while the worker is idle."""
    async with running(write_function(code, **own())) as function:
        found = acknowledged(function)
        assert await function.deliver(b"a", b"b", first=7) == [AWAITING_ACK, AWAITING_ACK]
        await function.until(lambda: len(found) == 2)
        assert sorted(found) == [(P, 7), (P, 8)]
        assert await function.deliver(b"c", first=9) == [AWAITING_ACK]


async def test_an_acknowledgement_from_another_thread_is_refused_in_words(write_function: Write, running: Run) -> None:
    """The worker's connection belongs to one thread; a second one would take its frames."""
    code = """
        import asyncio, threading
        from nuclio_sdk import QualifiedOffset
        def handler(context, event):
            failures = []
            def acknowledge():
                try:
                    asyncio.run(context.platform.explicit_ack(QualifiedOffset.from_event(event)))
                except RuntimeError as cause:
                    failures.append(str(cause))
            thread = threading.Thread(target=acknowledge)
            thread.start()
            thread.join()
            raise ValueError(failures[0])
    """
    async with running(write_function(code, **own())) as function:
        found = acknowledged(function)
        [reply] = await function.deliver(b"a")
        assert "explicit_ack was called in another thread" in reply.reason
        assert found == []


@pytest.mark.parametrize("mode", ["disable", "enable", "explicitOnly"])
async def test_what_a_record_waits_for_is_the_mode_and_the_header(
    write_function: Write, running: Run, mode: str
) -> None:
    """The header in any letter case; a failure is one in every mode.

    A replay waits for nothing, and its handler can tell it from a first delivery.
    """
    code = """
        def handler(context, event):
            replay = {"X-Headrace-Replay": b"job-1"} if event.body == b"replay" else {}
            assert dict(event.headers) == replay
            response = context.Response(body=event.body)
            if event.body in (b"sdk", b"replay"):
                response.ensure_no_ack()
            elif event.body == b"hand":
                response.headers["X-NUCLIO-Stream-No-Ack"] = "true"
            elif event.body == b"no":
                response.headers["x-nuclio-stream-no-ack"] = False
            elif event.body == b"bad":
                raise ValueError
            return response
    """
    expected = {
        "disable": [ACK, ACK, ACK, ACK],
        "enable": [AWAITING_ACK, AWAITING_ACK, ACK, ACK],
        "explicitOnly": [AWAITING_ACK, AWAITING_ACK, AWAITING_ACK, AWAITING_ACK],
    }
    async with running(write_function(code, **own(mode))) as function:
        *replies, bad = await function.deliver(b"sdk", b"hand", b"no", b"a", b"bad")
        assert (replies, bad.error) == (expected[mode], "ValueError")
        replayed = Delivery("g", P, 1, [Record("flights", 3, 0, 0, b"k", b"replay")], 1, "job-1")
        assert await function.destination.deliver(replayed) == [ACK]


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_worker_stops_between_two_records_when_a_partition_is_given_up(
    write_function: Write, running: Run, kind: str
) -> None:
    """Records that are not begun are released: those of the frame, of the waiting frame, and without a worker."""
    folder = write_function(WAITS.replace("def handler", f"{kind} handler"))
    async with running(folder) as function:
        function.destination.assigned([P])
        first = function.begin(b"a", b"wait", b"never")
        await function.until(lambda: called(folder, "wait"))
        others = [function.begin(b"later", partition=4), function.begin(b"never", first=10)]
        others += [function.begin(b"never", first=20), function.begin(b"later", partition=5)]
        await function.until(lambda: function.in_flight() == 2)
        function.destination.draining([P])
        await function.until(lambda: others[1] and others[2])
        assert others[1] == others[2] == [[NOT_BEGUN]]
        (folder / "go wait").touch()
        await function.until(lambda: first and others[0] and others[3])
        assert (first, others[0], others[3]) == ([[ACK, ACK, NOT_BEGUN]], [[ACK]], [[ACK]])
        await function.destination.drained([P], Deadline(function.clock, 5))
        assert [name for name, _ in calls(folder)] == ["a", "wait", "later", "later"]
        function.destination.assigned([P])
        assert await function.deliver(*[b"%d" % n for n in range(700)]) == [ACK] * 700
        assert function.service.restarts == 0


async def test_a_partition_that_returns_while_its_lost_events_end_keeps_its_worker(
    write_function: Write, running: Run
) -> None:
    """After a loss the wait for its last event must not end the new assignment."""
    folder = write_function(WAITS)
    async with running(folder) as function:
        destination = function.destination
        destination.assigned([P])
        function.begin(b"wait")
        await function.until(lambda: called(folder, "wait"))
        function.tasks[0].cancel()
        lost = function.service.spawn(destination.drained([P], Deadline(function.clock, 60)), "drained")
        await asyncio.sleep(0)
        destination.assigned([P])
        (folder / "go wait").touch()
        await lost
        assert P in destination._partition_workers._assigned
        assert await function.deliver(b"a") == [ACK]
