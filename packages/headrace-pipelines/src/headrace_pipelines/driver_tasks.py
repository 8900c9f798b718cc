"""Runs tasks for commands and tests, such as showing rows, in a driver process with a temporary folder."""

import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import DriverLost, EnvironmentProblem, PipelineInvalid
from headrace.extras import require
from headrace.runtime import Service, run_blocking
from headrace_pipelines import driver_protocol
from headrace_pipelines.connector import connector_options, refusal, with_registry, write_secrets
from headrace_pipelines.driver_inputs import jars_of
from headrace_pipelines.driver_process import DriverProcess, Toolchain, find_toolchain, require_spark
from headrace_pipelines.load import sql_files_of
from headrace_pipelines.spark_project import SparkProject
from headrace_pipelines.spec import PipelineKafka, PipelineSpec
from headrace_pipelines.sql import in_plain_words, reported_position

_QUICK = ("-XX:TieredStopAtLevel=1",)
"""A task is over before optimised code would pay off."""


class TaskDriver(Service):
    """A driver process that keeps its Spark session from task to task, apart from the runs of pipelines."""

    def __init__(self, folder: Path, *, debug: bool) -> None:
        super().__init__("driver of tasks")
        self._folder, self._debug = folder, debug
        self._driver: DriverProcess | None = None
        self._toolchain: Toolchain | None = None
        self._session: tuple[Any, ...] = ()
        """What the session of the running process was made from."""

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, *, debug: bool = False) -> AsyncIterator[Self]:
        """Give a driver whose process starts with the first task; with `debug` its errors have Spark's stack traces.

        Raises:
            EnvironmentProblem: pyspark is not installed.
        """
        require_spark()
        with tempfile.TemporaryDirectory(prefix="headrace-pipeline-", ignore_cleanup_errors=True) as folder:
            driver = cls(Path(folder), debug=debug)
            try:
                yield driver
            finally:
                await driver._end()
                write_secrets(Path(folder), {})
                await driver.stop()

    async def run_task(
        self,
        file: Path,
        spec: PipelineSpec,
        kafka: KafkaConfig,
        task: driver_protocol.DriverTask,
        registry: SchemaRegistryConfig | None = None,
    ) -> Any:
        """Return the result of a task with the pipeline of a file.

        Raises:
            PipelineInvalid: Spark rejects the pipeline, or the task fails.
            EnvironmentProblem: The machine lacks what Spark needs.
            DriverLost: The process has ended.
        """
        self._toolchain = self._toolchain or await find_toolchain()
        if isinstance(spec, SparkProject):
            require("connect", "a project of Spark Declarative Pipelines")
        security = await run_blocking(functools.partial(connector_options, kafka.security.in_use))
        security = with_registry(security, registry or SchemaRegistryConfig())
        plan = await self._plan(spec, kafka, task, self._toolchain, security.options)
        kept = self._driver if self._session == (spec.driver, security) else None
        if kept:
            driver = kept
            driver.request(plan)
        else:
            await self._end()
            driver = self._driver = await DriverProcess.start(self, plan, self._toolchain, security)
            self._session = spec.driver, security
        response = await self._response(driver)
        if isinstance(response, driver_protocol.TaskResult):
            return response.result
        if not (response and response.stack):  # the process has ended
            code, output = await driver.exit_code(), driver.last_output()
            self._driver = None
            if kept:  # it may have ended before this task
                return await self.run_task(file, spec, kafka, task, registry)
            if not response:
                text = f"The Spark driver ended with exit code {code}. Its last output: {output}"
                raise DriverLost(text, exit_code=code)
        if response.error == driver_protocol.MACHINE_SHORT:
            raise EnvironmentProblem(response.text)
        text = refusal(response.text, kafka, spec) if response.error == driver_protocol.KAFKA_REFUSES else response.text
        raise PipelineInvalid(self.sentence(file, {"part": response.part, "text": text, "stack": response.stack}))

    async def _plan(
        self,
        spec: PipelineSpec,
        kafka: KafkaConfig,
        task: driver_protocol.DriverTask,
        toolchain: Toolchain,
        security: dict[str, str],
    ) -> driver_protocol.DriverPlan:
        own_jvm = spec.driver.model_copy(update={"remote": None})  # also for a pipeline of a Connect server
        return driver_protocol.DriverPlan(
            spec=spec.model_copy(update={"kafka": PipelineKafka(), "driver": own_jvm}),
            bootstrap_servers=kafka.bootstrap_servers,
            security=security,
            folder=self._folder,
            jars=await jars_of(spec, toolchain),
            java_flags=(*_QUICK, *toolchain.flags),
            task=task,
        )

    async def _response(self, driver: DriverProcess) -> driver_protocol.TaskResult | driver_protocol.Failed | None:
        """Return the response to a task. A failure without a stack trace, or none at all, ends the process."""
        failed: driver_protocol.Failed | None = None
        async for event in driver.events():
            if isinstance(event, driver_protocol.TaskResult):
                return event
            if isinstance(event, driver_protocol.Failed):
                failed = event
                if event.stack:
                    break
        return failed

    def sentence(self, file: Path, problem: Mapping[str, str]) -> str:
        """Return a problem of Spark with file and line; with its stack trace if the user asks for it."""
        tree = read_tree(read_text(file, PipelineInvalid, "Correct the path"), str(file), found := Problems())
        path = tuple(problem["part"].split(".")) if problem["part"] else ()
        location = ""
        if name := sql_files_of(tree).get(path):
            sql_file = file.parent / name
            at = reported_position(problem["text"], read_text(sql_file, PipelineInvalid, "Correct the path"))
            location = f"{sql_file}:{at[0]}:{at[1]}" if at else ""
        text = found.located(path, in_plain_words(problem["text"]), location)
        return f"{text}\n{problem['stack']}" if self._debug and problem["stack"] else text

    async def _end(self) -> None:
        if self._driver:
            self._driver.kill()
            await self._driver.exit_code()
            self._driver = None
