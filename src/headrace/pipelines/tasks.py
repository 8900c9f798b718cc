"""The asking side of tasks: a driver process in a temporary folder, which answers commands and tests."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config.explain import location_of
from headrace.config.kafka import KafkaConfig
from headrace.config.yaml_tree import Problems, dotted, read_text, read_tree
from headrace.errors import DriverLost, PipelineInvalid
from headrace.lifecycle import Service, run_blocking
from headrace.pipelines.connector import connector_options, refusal, require_supported
from headrace.pipelines.driver import plan as wire
from headrace.pipelines.process import DriverProcess, find_toolchain, require_spark
from headrace.pipelines.spec import PipelineKafka, PipelineSpec


class TaskDriver(Service):
    """A driver process that keeps its Spark session from task to task, and that no run of a pipeline knows."""

    def __init__(self, *, debug: bool = False) -> None:
        """Prepare it; with `debug` its errors have Spark's stack traces."""
        super().__init__("driver of tasks")
        self._debug = debug
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-pipeline-"))
        self._driver: DriverProcess | None = None
        self._began: tuple[Any, ...] = ()
        """What the session of the running process was made from."""

    async def start(self) -> None:
        """Check that Spark is here; the process starts with the first task.

        Raises:
            EnvironmentProblem: pyspark is not installed.
        """
        require_spark()

    async def stop(self) -> None:
        await self._end()
        await super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ask(self, file: Path, spec: PipelineSpec, kafka: KafkaConfig, task: wire.DriverTask) -> Any:
        """Return the result of a task with the pipeline of a file.

        Raises:
            PipelineInvalid: Spark refuses the pipeline, or the task fails.
            DriverLost: The process has ended.
        """
        require_supported(kafka)
        toolchain = await find_toolchain()
        security = await run_blocking(functools.partial(connector_options, kafka.security.in_use))
        plan = wire.DriverPlan(
            spec=spec.model_copy(update={"kafka": PipelineKafka()}),
            bootstrap_servers=kafka.bootstrap_servers,
            security=security.options,
            folder=self._folder,
            jars=toolchain.jars,
            task=task,
        )
        session = (spec.driver, security)
        if self._driver and session == self._began:
            self._driver.request(plan)
        else:
            await self._end()
            self._driver, self._began = await DriverProcess.start(self, plan, toolchain, security), session
        async for event in self._driver.events():
            if isinstance(event, wire.Answered):
                return event.result
            if isinstance(event, wire.Failed):
                text = refusal(event.text, kafka, spec) if event.error == wire.KAFKA_REFUSES else event.text
                raise PipelineInvalid(self.sentence(file, {"part": event.part, "text": text, "stack": event.stack}))
        code, output = await self._driver.exit_code(), self._driver.last_output()
        self._driver = None
        raise DriverLost(f"The Spark driver ended with exit code {code}. Its last output: {output}", exit_code=code)

    def sentence(self, file: Path, problem: Mapping[str, str]) -> str:
        """Return a problem of Spark with file and line; with its stack trace if the user asks for it."""
        _, locations = read_tree(read_text(file, PipelineInvalid, "Correct the path"), str(file), Problems())
        path = tuple(problem["part"].split(".")) if problem["part"] else ()
        text = ": ".join(filter(None, (location_of(path, locations), dotted(path), problem["text"])))
        return f"{text}\n{problem['stack']}" if self._debug and problem["stack"] else text

    async def _end(self) -> None:
        if self._driver:
            self._driver.kill()
            await self._driver.exit_code()
            self._driver = None
