"""Worker processes that are killed, end, hang or grow, and their events."""

import pytest

from headrace.delivery.outcomes import ACK
from headrace.records import TopicPartition
from headrace.runtime import Deadline
from tests.function_workers import PARTITION, WAITS, Run, Write, called, calls, two_frames


@pytest.mark.parametrize(
    "dies",
    [
        "os.kill(os.getpid(), 9)",
        "time.sleep(600)",
        "hog = [(b'x' * (1_000_000 + n), time.sleep(0.002)) for n in range(1000)]",
    ],
)
async def test_a_death_costs_the_record_at_work_one_attempt_and_no_other(
    write_function: Write, running: Run, dies: str
) -> None:
    """Killed, hung or out of memory: the frame at hand is served, and its records are not blamed."""
    code = f"""
        import os, pathlib, time
        def handler(context, event):
            name = event.body.decode()
            with open("calls", "a") as calls:
                calls.write(f"{{name}} {{os.getpid()}}\\n")
            if name == "wait" and not pathlib.Path("died").exists():
                while not pathlib.Path("go wait").exists():
                    time.sleep(0.005)
                pathlib.Path("died").touch()
                {dies}
    """
    spec = {"eventTimeout": "2s"} if "sleep(600)" in dies else {}
    folder = write_function(code, spec=spec, trigger={"workerMemoryLimit": "100Mi"})
    async with running(folder) as function:
        first, second = await two_frames(function, folder)
        (folder / "go wait").touch()
        await function.until(lambda: first and second)
        assert (first, second) == ([[ACK] * 3], [[ACK] * 2])
        assert function.service.restarts == 1
        counts = {name: len([each for each, _ in calls(folder) if each == name]) for name, _ in calls(folder)}
        assert counts == {"before": 2, "wait": 2, "after": 1, "second": 1, "third": 1}


async def test_a_worker_over_its_memory_is_replaced_between_two_frames(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """No event is to blame, and none is called twice."""
    code = """
        import time
        held = []
        def handler(context, event):
            held.append(b"x" * 20_000_000)
            open("calls", "a").write("call ")
            time.sleep(0.3)
    """
    folder = write_function(code, trigger={"workerMemoryLimit": "100Mi"})
    async with running(folder) as function:
        for number in range(6):
            assert await function.deliver(b"a", first=number) == [ACK]
        assert function.service.restarts >= 1
        assert not len(function.destination._suspects)
        assert (folder / "calls").read_text() == "call " * 6
    assert "exceed workerMemoryLimit (100 MiB)" in caplog.text


async def test_a_worker_that_ends_again_and_again_is_restarted_at_a_bounded_rate(
    write_function: Write, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it serves events in between; the others continue meanwhile."""
    monkeypatch.setattr("headrace.functions.workers._FREE_RESTARTS", 2)
    monkeypatch.setattr("headrace.functions.workers._RESTARTS_PER_SECOND", 0.001)
    code = """
        import os, pathlib
        def handler(context, event):
            mark = pathlib.Path(str(event.offset))
            if event.body == b"die" and not mark.exists():
                mark.touch()
                os._exit(1)
    """
    async with running(write_function(code, workers=2, workerAllocationMode="static")) as function:
        function.destination.assigned([TopicPartition("flights", number) for number in range(2)])
        for number in range(3):
            assert await function.deliver(b"live", b"die", first=number * 2, partition=0) == [ACK, ACK]
        waits = function.begin(b"live", b"die", first=6, partition=0)
        await function.until(lambda: function.service.restarts == 4)
        for number in range(5):
            assert await function.deliver(b"live", first=number, partition=1) == [ACK]
        begun = function.clock.monotonic()
        await function.until(lambda: waits or function.clock.monotonic() > begun + 1)
        assert (waits, function.service.restarts) == ([], 4)


async def test_a_handler_past_the_deadline_costs_its_worker_and_blames_no_record(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is replaced at once; the frame at hand, of a partition that stays, is served by the next one."""
    folder = write_function(WAITS)
    async with running(folder) as function:
        function.begin(b"wait", b"never")
        await function.until(lambda: called(folder, "wait"))
        other = function.begin(b"other", partition=4)
        await function.until(lambda: function.in_flight() == 2)
        function.destination.draining([PARTITION])
        function.tasks[0].cancel()  # as the delivery core does at the deadline
        begun = function.clock.monotonic()
        await function.destination.drained([PARTITION], Deadline(function.clock, 0.2))
        assert function.clock.monotonic() - begun < 60
        await function.until(lambda: other and function.service.restarts == 1)
        assert other == [[ACK]]
        assert [name for name, _ in calls(folder)] == ["wait", "other"]
        assert not len(function.destination._suspects)
    assert "an event of flights-3 was still running when the partition was revoked" in caplog.text
