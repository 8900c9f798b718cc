"""Start order, death, drain, stop."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import KafkaError, ServiceDied, TopicNotFound
from headrace.runtime import Deadline, Readiness, RestartedServices, Service, Signals, Supervisor, SystemClock
from headrace.runtime.gauge_registry import GaugeKey, gauges
from tests.raw_server import until
from tests.unit.runtime.recorded_service import RecordedService


def supervised(*services: Service, seconds: float = 5) -> Supervisor:
    return Supervisor(services, SystemClock(), seconds)


async def test_services_start_in_order_and_go_in_reverse() -> None:
    """Every service drains before the first one stops; one that outlives the others goes last."""
    notes: list[str] = []
    supervisor, signals = supervised(RecordedService("a", notes)), Signals()
    last = RecordedService("last", notes)
    last.outlives = True
    supervisor.add(last)
    supervisor.add(RecordedService("b", notes))
    await supervisor.start()
    signals.notice()
    await supervisor.run(signals)
    order = ["a", "last", "b"], ["b", "a", "last"], ["b", "a", "last"]
    done = [*zip(("start", "drain", "stop"), order, strict=True)]
    assert notes == [f"{what} {name}" for what, names in done for name in names]


async def test_a_start_that_fails_stops_what_runs() -> None:
    """Nothing is left behind though one cannot stop either, and the first error is the caller's."""
    notes: list[str] = []
    supervisor = supervised(RecordedService("a", notes), RecordedService("b", notes, "start", "stop"))
    with pytest.raises(RuntimeError, match="cannot start"):
        await supervisor.start()
    assert notes == ["start a", "start b", "stop b", "stop a"]


async def test_a_death_is_named_in_readiness_and_ends_the_process() -> None:
    """The others are drained, and the error names the one that died."""
    notes: list[str] = []
    service = RecordedService("b", notes)
    supervisor = supervised(RecordedService("a", notes), service)
    await supervisor.start()

    async def fail() -> None:
        raise OSError("gone")

    service.spawn(fail(), "work")
    with pytest.raises(ServiceDied, match="service b ended by itself: gone"):
        await supervisor.run(Signals())
    assert supervisor.readiness()["b"] == Readiness(False, "ended by itself: gone")
    assert notes[-4:] == ["drain b", "drain a", "stop b", "stop a"]


async def test_a_task_that_can_begin_anew_ends_nothing_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises: it is started again, with growing pauses, and readiness, log and a metric say so."""
    monkeypatch.setattr("headrace.runtime.service._FIRST_PAUSE_SECONDS", 0.001)
    service, calls, done = RecordedService("b", []), list[int](), asyncio.Event()
    supervisor = supervised(service)
    await supervisor.start()

    async def work() -> None:
        calls.append(len(calls))
        if len(calls) < 4:
            raise [KafkaError("fenced"), TopicNotFound("topic t does not exist"), ValueError("defect")][calls[-1]]
        done.set()

    service.keep(work, "ends")
    await asyncio.wait_for(done.wait(), 10)
    assert service.death is None
    assert supervisor.readiness()["b"] == Readiness(True, "ends failed: ValueError('defect')")
    lines = [one.getMessage() for one in caplog.records]
    assert lines == [
        "b: ends failed: fenced; will restart in 0.001 s",
        "b: ends failed: topic t does not exist; will restart in 0.002 s",
        "b: ends failed: ValueError('defect'); will restart in 0.004 s",
    ]
    assert [bool(one.exc_info and one.exc_info[0]) for one in caplog.records] == [False, False, True]
    failures = GaugeKey("headrace_task_failures_total", (("service", "b"),))
    assert gauges()[failures] == 3
    await supervisor.stop()
    assert failures not in gauges()


async def test_services_of_one_consumer_end_and_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one dies, or cannot start again, the process and its other services go on, and readiness has the reason."""
    monkeypatch.setattr("headrace.runtime.service._FIRST_PAUSE_SECONDS", 0.001)
    notes: list[str] = []
    made = [
        [RecordedService(f"a{n}", notes, *(["start", "stop"] if n == 1 else [])), RecordedService(f"b{n}", notes)]
        for n in range(3)
    ]
    births = iter(made)
    consumer = RestartedServices("consumer", next(births), lambda: next(births), SystemClock(), 5)
    supervisor = supervised(consumer, RecordedService("other", notes))
    await supervisor.start()
    assert set(supervisor.readiness()) == {"a0", "b0", "other"}
    made[0][1].die(KafkaError("fenced"))
    assert supervisor.readiness()["b0"] == Readiness(False, "ended by itself: fenced")
    await until(lambda: "start b2" in notes)
    first = ["start a0", "start b0", "start other"]
    assert notes[3:] == ["drain b0", "drain a0", "stop b0", "stop a0", "start a1", "stop a1", "start a2", "start b2"]
    assert notes[:3] == first
    found = supervisor.readiness()
    assert found["consumer"] == Readiness(True, "services failed: RuntimeError('cannot start')")
    assert found["a2"] == found["b2"] == Readiness(True)
    await supervisor.drain()
    await supervisor.stop()
    assert notes[11:] == ["drain other", "drain b2", "drain a2", "stop other", "stop b2", "stop a2"]


@pytest.mark.parametrize("broken", ["drain", "hang"])
async def test_one_service_that_cannot_drain_does_not_keep_the_others(broken: str) -> None:
    """The deadline is shared; errors are logged; all are drained and stopped."""
    notes: list[str] = []
    service, signals = RecordedService("b", notes, broken), Signals()
    supervisor = supervised(RecordedService("a", notes), service, seconds=0.05)
    if broken == "hang":
        service.may_drain.clear()
    await supervisor.start()
    signals.notice()
    await supervisor.run(signals)
    assert "drain a" in notes or broken == "hang"
    assert notes[-2:] == ["stop b", "stop a"]


async def test_all_services_begin_to_drain_before_one_is_waited_for() -> None:
    """Also those that restart together: consumers leave their groups side by side, not each with what is left."""
    begun: list[str] = []

    class Leaving(RecordedService):
        def begin_drain(self, deadline: Deadline) -> None:
            begun.append(self.name)

    a, b, c = (Leaving(name, []) for name in "abc")
    nested = RestartedServices("group", [a, b], lambda: [], SystemClock(), 5)
    supervisor = supervised(nested, c, seconds=0.05)
    c.may_drain.clear()
    await supervisor.start()
    await supervisor.drain()
    assert begun[:3] == ["c", "b", "a"]
    await supervisor.stop()
