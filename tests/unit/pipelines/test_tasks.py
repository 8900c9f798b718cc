"""Drivers that serve tasks: their death between two tasks, and responses that are too large."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import DriverLost, EnvironmentProblem, PipelineInvalid
from headrace_pipelines import driver_protocol, driver_tasks
from headrace_pipelines.driver import tasks
from tests.pipeline_harness import SPEC, FakeDriver, plan_of, toolchain

FILE = "name: delays\nsources: {}\nflows: {}\n"
LOST = driver_protocol.Failed("ConnectionRefusedError", "[Errno 111] Connection refused", retriable=True)


class RequestedDriver(FakeDriver):
    """A driver that responds to each request with what the test gives."""

    def __init__(self, responses: list[driver_protocol.AnyEvent | None]) -> None:
        super().__init__()
        self.responses = responses
        self.plans: list[driver_protocol.DriverPlan] = []

    def request(self, plan: driver_protocol.DriverPlan) -> None:
        self.plans.append(plan)
        while self.responses and (event := self.responses.pop(0)):
            self.report(event)
            if isinstance(event, driver_protocol.TaskResult) or (
                isinstance(event, driver_protocol.Failed) and event.stack
            ):
                return
        self.end(1)


Run = Callable[..., tuple[list[Any], list[RequestedDriver]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run this number of tasks with drivers that respond as given. Returns their results, and the drivers."""

    def go(count: int, *drivers: list[driver_protocol.AnyEvent | None]) -> tuple[list[Any], list[RequestedDriver]]:
        (tmp_path / "p.yaml").write_text(FILE)
        started: list[RequestedDriver] = []

        class Starter:
            @staticmethod
            async def start(owner: Any, plan: driver_protocol.DriverPlan, *_: Any) -> RequestedDriver:
                started.append(RequestedDriver(drivers[len(started)]))
                started[-1].request(plan)
                return started[-1]

        monkeypatch.setattr(driver_tasks, "require_spark", lambda: None)
        monkeypatch.setattr(driver_tasks, "DriverProcess", Starter)
        monkeypatch.setattr(driver_tasks, "find_toolchain", toolchain)

        async def main() -> list[Any]:
            found: list[Any] = []
            async with driver_tasks.TaskDriver.opened() as driver:
                for _ in range(count):
                    try:
                        show = driver_protocol.DriverTask(kind="show")
                        found.append(await driver.run_task(tmp_path / "p.yaml", SPEC, KafkaConfig(), show))
                    except (PipelineInvalid, EnvironmentProblem, DriverLost) as cause:
                        found.append(type(cause))
            return found

        return asyncio.run(main()), started

    return go


@pytest.mark.parametrize("end", [[None], [LOST, None]], ids=["process", "its JVM"])
def test_a_task_is_not_lost_with_the_session_of_the_task_before(
    run: Run, end: list[driver_protocol.AnyEvent | None]
) -> None:
    """The session died between two tasks: a new one gets the same request."""
    found, drivers = run(
        3, [driver_protocol.TaskResult(1), *end], [driver_protocol.TaskResult(2), driver_protocol.TaskResult(3)]
    )
    assert found == [1, 2, 3]
    assert [len(driver.plans) for driver in drivers] == [2, 2]


def test_a_task_that_ends_its_session_is_tried_once_more_at_most(run: Run) -> None:
    """With a session of its own; the task after it has the next one."""
    found, drivers = run(3, [driver_protocol.TaskResult(1), None], [None], [driver_protocol.TaskResult(3)])
    assert found == [1, DriverLost, 3]
    assert [len(driver.plans) for driver in drivers] == [2, 1, 1]
    assert run(1, [LOST, None])[0] == [PipelineInvalid]


def test_a_task_that_fails_keeps_the_session(run: Run) -> None:
    """The error is one of the task."""
    refused = driver_protocol.Failed("UNRESOLVED_COLUMN", "no column x", retriable=False, stack="Traceback")
    found, drivers = run(2, [refused, driver_protocol.TaskResult(2)])
    assert (found, len(drivers)) == ([PipelineInvalid, 2], 1)
    busy = msgspec.structs.replace(refused, error=driver_protocol.MACHINE_SHORT)
    assert run(1, [busy])[0] == [EnvironmentProblem], "it is no mistake of the file"


def test_a_response_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that requested it could not read it; the session continues."""
    row = {"text": "ä" * 1_000_000}
    for count, kind in ((10, driver_protocol.TaskResult), (40, driver_protocol.Failed)):
        monkeypatch.setattr(tasks, "kept_rows", lambda *_, count=count: {"stores": [row] * count})
        plan = plan_of(SPEC, task=driver_protocol.DriverTask(kind="state"))
        events: list[Any] = []
        tasks.serve_requests(SimpleNamespace(), plan, io.StringIO(), events.append)  # type: ignore[arg-type]
        assert [type(event) for event in events] == [kind]
    assert "larger than 64 MB: show fewer of them (--limit), or fewer columns" in events[0].text
    assert events[0].stack
