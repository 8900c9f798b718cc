"""Drivers that answer tasks: their death between two tasks, and answers that are too large."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import DriverLost, PipelineInvalid
from headrace.pipelines import driver_tasks, protocol
from headrace.pipelines.driver import tasks as answering
from headrace.pipelines.driver_process import Toolchain
from headrace.runtime.jvm import ClassArchive, Java
from tests.pipeline_harness import SPEC, FakeDriver, plan_of

FILE = "name: delays\nsources: {}\nflows: {}\n"
LOST = protocol.Failed("ConnectionRefusedError", "[Errno 111] Connection refused", retriable=True)


class AskedDriver(FakeDriver):
    """A driver that answers each request by what the test gives."""

    def __init__(self, responses: list[protocol.AnyEvent | None]) -> None:
        super().__init__()
        self.responses = responses
        self.plans: list[protocol.DriverPlan] = []

    def request(self, plan: protocol.DriverPlan) -> None:
        self.plans.append(plan)
        while self.responses and (event := self.responses.pop(0)):
            self.report(event)
            if isinstance(event, protocol.TaskResult) or (isinstance(event, protocol.Failed) and event.stack):
                return
        self.end(1)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], list[AskedDriver]]]:
    """Ask for so many tasks of drivers that answer as given; return what came of each, and the drivers."""

    def go(count: int, *drivers: list[protocol.AnyEvent | None]) -> tuple[list[Any], list[AskedDriver]]:
        (tmp_path / "p.yaml").write_text(FILE)
        started: list[AskedDriver] = []

        class Starter:
            @staticmethod
            async def start(owner: Any, plan: protocol.DriverPlan, *_: Any) -> AskedDriver:
                started.append(AskedDriver(drivers[len(started)]))
                started[-1].request(plan)
                return started[-1]

        async def toolchain() -> Toolchain:
            return Toolchain((), ClassArchive(Java(Path("java"), Path("java/bin/java"), 17, ""), Path("jars")))

        monkeypatch.setattr(driver_tasks, "require_spark", lambda: None)
        monkeypatch.setattr(driver_tasks, "DriverProcess", Starter)
        monkeypatch.setattr(driver_tasks, "find_toolchain", toolchain)

        async def main() -> list[Any]:
            found: list[Any] = []
            async with driver_tasks.TaskDriver.opened() as driver:
                for _ in range(count):
                    try:
                        show = protocol.DriverTask(kind="show")
                        found.append(await driver.run_task(tmp_path / "p.yaml", SPEC, KafkaConfig(), show))
                    except (PipelineInvalid, DriverLost) as cause:
                        found.append(type(cause))
            return found

        return asyncio.run(main()), started

    return go


@pytest.mark.parametrize("words", [[None], [LOST, None]], ids=["process", "its JVM"])
def test_a_task_is_not_lost_with_the_session_of_the_task_before(
    ask: Callable[..., tuple[list[Any], list[AskedDriver]]], words: list[protocol.AnyEvent | None]
) -> None:
    """The session died while nothing was asked: a new one answers the same request."""
    found, drivers = ask(3, [protocol.TaskResult(1), *words], [protocol.TaskResult(2), protocol.TaskResult(3)])
    assert found == [1, 2, 3]
    assert [len(driver.plans) for driver in drivers] == [2, 2]


def test_a_task_that_ends_its_session_is_tried_once_more_at_most(
    ask: Callable[..., tuple[list[Any], list[AskedDriver]]],
) -> None:
    """With a session of its own; the task after it has the next one."""
    found, drivers = ask(3, [protocol.TaskResult(1), None], [None], [protocol.TaskResult(3)])
    assert found == [1, DriverLost, 3]
    assert [len(driver.plans) for driver in drivers] == [2, 1, 1]
    assert ask(1, [LOST, None])[0] == [PipelineInvalid]


def test_a_task_that_fails_keeps_the_session(ask: Callable[..., tuple[list[Any], list[AskedDriver]]]) -> None:
    """The error is one of the task."""
    refused = protocol.Failed("UNRESOLVED_COLUMN", "no column x", retriable=False, stack="Traceback")
    found, drivers = ask(2, [refused, protocol.TaskResult(2)])
    assert found == [PipelineInvalid, 2]
    assert len(drivers) == 1


def test_a_response_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asks could not read it; the session drivers on."""
    row = {"text": "ä" * 1_000_000}
    for count, kind in ((10, protocol.TaskResult), (40, protocol.Failed)):
        monkeypatch.setattr(answering, "kept_rows", lambda *_, count=count: {"stores": [row] * count})
        plan = plan_of(SPEC, task=protocol.DriverTask(kind="state"))
        events: list[Any] = []
        answering.serve_requests(SimpleNamespace(), plan, io.StringIO(), events.append)  # type: ignore[arg-type]
        assert [type(event) for event in events] == [kind]
    assert "larger than 64 MB: show fewer of them (--limit), or fewer columns" in events[0].text
    assert events[0].stack
