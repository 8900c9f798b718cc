"""Tests of pipelines: given rows in, rows of flows and views out, by one Spark session and without Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace.config.kafka import KafkaConfig
from headrace.extras import require

if TYPE_CHECKING:  # a project without pipelines has the fixtures, too
    from headrace_pipelines.driver_tasks import TaskDriver

T = TypeVar("T")


class PipelineRows:
    """The fixture `pipeline_rows`: call it with a pipeline file, a flow or view, and the rows of the sources.

    Spark starts with the first call, and all later calls use its session. Only for tests without an event loop.
    """

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._stack = contextlib.AsyncExitStack()
        self._driver: TaskDriver | None = None

    def __call__(
        self,
        file: str | Path,
        name: str,
        given: Mapping[str, Sequence[Any] | str | Path],
        *,
        streaming: bool = False,
        step_seconds: float = 1.0,
    ) -> list[dict[str, Any]]:
        """Return the rows of a flow or view.

        Args:
            file: The pipeline file.
            name: The flow or view.
            given: Source to its rows, to a CSV or JSON file with them, or to a list of these: the steps. A source that
                is not named has no rows.
            streaming: Whether each step is a micro-batch of a streaming query; the rows are then all that it writes.
            step_seconds: With `streaming`: time that passes from one step to the next for a processor.

        Raises:
            PipelineInvalid: The file is wrong, or Spark refuses it.
        """
        require("pipelines", "the fixture pipeline_rows")
        from headrace_pipelines.driver_protocol import DriverTask
        from headrace_pipelines.load import load_pipeline
        from headrace_pipelines.test_cases import steps_of

        path = Path(file)
        steps = {
            source: steps_of(str(rows) if isinstance(rows, str | Path) else list(rows), path.parent)
            for source, rows in given.items()
        }
        task = DriverTask(kind="test", given=steps, expect={name: None}, streaming=streaming, step_seconds=step_seconds)
        found = self.run(lambda driver: driver.run_task(path, load_pipeline(path, check=True), KafkaConfig(), task))
        return [json.loads(row) for row in found[name]["actual"]]

    def run(self, steps: Callable[[TaskDriver], Coroutine[Any, Any, T]]) -> T:
        """Run steps with the driver of the session. Returns what they return."""

        async def main() -> T:
            if not self._driver:
                from headrace_pipelines.driver_tasks import TaskDriver

                self._driver = await self._stack.enter_async_context(TaskDriver.opened())
            return await steps(self._driver)

        return self._runner.run(main())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
