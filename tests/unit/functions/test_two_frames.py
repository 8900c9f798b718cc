"""A worker has one frame at work and another one that waits in it."""

from __future__ import annotations

import pytest

from headrace.delivery.outcomes import ACK
from headrace.records import TopicPartition
from headrace.runtime import Deadline
from tests.function_workers import WAITS, Run, Write, called, calls, two_frames

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file")  # of handlers


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_frame_at_hand_goes_to_a_worker_that_is_idle(write_function: Write, running: Run, kind: str) -> None:
    """A record does not wait for a slow one of another partition while a worker is free."""
    folder = write_function(WAITS.replace("def handler", f"{kind} handler"), workers=2)
    async with running(folder) as function:
        await function.until(lambda: all(slot.up for slot in function.service._slots))
        for number in range(2):
            function.begin(b"wait%d" % number, partition=number)
        await function.until(lambda: called(folder, "wait0") and called(folder, "wait1"))
        behind = [function.begin(b"quick", partition=number) for number in (2, 3)]
        await function.until(lambda: function.in_flight(0) == function.in_flight(1) == 2)
        (folder / "go wait1").touch()
        await function.until(lambda: behind == [[[ACK]], [[ACK]]])
        assert not function.tasks[0].done()
        quick = {pid for name, pid in calls(folder) if name == "quick"}
        assert quick == {pid for name, pid in calls(folder) if name == "wait1"}
        for number in (8, 9):  # both workers are behind what they had
            function.begin(b"wait%d" % number, partition=number)
        (folder / "go wait0").touch()
        await function.until(lambda: called(folder, "wait8") and called(folder, "wait9"))
        assert [name for name, _ in calls(folder)].count("quick") == 2, "no record is called twice"
        for number in (8, 9):
            (folder / f"go wait{number}").touch()
        await function.until(lambda: all(task.done() for task in function.tasks))
        assert function.service.restarts == 0


async def test_a_delivery_that_is_spread_by_keys_gets_the_reply_of_each_record(
    write_function: Write, running: Run
) -> None:
    """In every partition a key has the same worker."""
    code = """
        def handler(context, event):
            with open("calls", "a") as calls:
                calls.write(f"{event.key.decode()} {context.worker_id}\\n")
            if event.body == b"7":
                raise ValueError
    """
    folder = write_function(code, workers=2, workerAllocationMode="key", ordering="key")
    async with running(folder) as function:
        await function.until(lambda: all(slot.up for slot in function.service._slots))
        values, keys = [b"%d" % n for n in range(20)], [b"k%d" % (n % 5) for n in range(20)]
        for partition in range(3):
            replies = await function.deliver(*values, partition=partition, keys=keys)
            assert [index for index, reply in enumerate(replies) if reply.error] == [7]
        workers = {key: {worker for name, worker in calls(folder) if name == key} for key, _ in calls(folder)}
        assert len(workers) == 5 and {len(found) for found in workers.values()} == {1}
        assert len(set.union(*workers.values())) == 2


async def test_the_time_limit_of_an_event_does_not_count_the_wait_at_hand(write_function: Write, running: Run) -> None:
    """A frame that waits longer than `eventTimeout` for short events is not late."""
    code = """
        import time
        def handler(context, event):
            time.sleep(0.1)
    """
    async with running(write_function(code, spec={"eventTimeout": "500ms"})) as function:
        await function.ready()
        first = function.begin(*[b"a"] * 6, partition=0)
        second = function.begin(*[b"a"] * 2, partition=1)
        await function.until(lambda: first and second)
        assert (first, second, function.service.restarts) == ([[ACK] * 6], [[ACK] * 2], 0)


async def test_a_drain_callback_follows_both_frames(
    write_function: Write, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its own time begins behind them."""
    monkeypatch.setattr("headrace.functions.process._CALLBACK_SECONDS", 0.1)
    code = (
        WAITS
        + """
    def init_context(context):
        context.platform.set_drain_callback(lambda: open("calls", "a").write("drained 0\\n"))
    """
    )
    folder = write_function(code)
    async with running(folder) as function:
        assert await function.deliver(b"early", partition=5) == [ACK]
        first, _ = await two_frames(function, folder)
        third = function.begin(b"wait2", partition=4)
        given_up = function.service.give_up([TopicPartition("flights", 5)], Deadline(function.clock, 60))
        drain, begun = function.service.spawn(given_up, "drain"), function.clock.monotonic()
        await function.until(lambda: function.service.restarts or function.clock.monotonic() > begun + 0.3)
        (folder / "go wait").touch()
        await function.until(lambda: called(folder, "third") and first)
        await function.until(lambda: called(folder, "drained"))
        (folder / "go wait2").touch()
        await drain
        await function.until(lambda: third)
        assert function.service.restarts == 0
        names = [name for name, _ in calls(folder)]
        assert names.index("drained") == names.index("third") + 1
