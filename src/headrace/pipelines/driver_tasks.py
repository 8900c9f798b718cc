"""The asking side of tasks: a driver process in a temporary folder, which answers commands and tests."""

import contextlib
import csv
import difflib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

from headrace.config.explain import validated
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.section import Section
from headrace.config.yaml_tree import MAX_BYTES, Problems, read_text, read_tree
from headrace.errors import DriverLost, PipelineInvalid
from headrace.pipelines import protocol
from headrace.pipelines.connector import connector_options, refusal, require_supported, with_registry, write_secrets
from headrace.pipelines.driver_process import DriverProcess, Toolchain, find_toolchain, require_spark
from headrace.pipelines.load import sql_files_of
from headrace.pipelines.spec import PipelineKafka, PipelineSpec
from headrace.pipelines.sql import in_plain_words, reported_position
from headrace.runtime import Service, run_blocking

_QUICK = ("-XX:TieredStopAtLevel=1",)
"""A task is over before code that is compiled well has paid."""


class TaskDriver(Service):
    """A driver process that keeps its Spark session from task to task, and that no run of a pipeline knows."""

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
        """Give a driver, whose process starts with the first task; with `debug` its errors have Spark's stack traces.

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

    async def ask(
        self,
        file: Path,
        spec: PipelineSpec,
        kafka: KafkaConfig,
        task: protocol.DriverTask,
        registry: SchemaRegistryConfig | None = None,
    ) -> Any:
        """Return the result of a task with the pipeline of a file.

        Raises:
            PipelineInvalid: Spark refuses the pipeline, or the task fails.
            DriverLost: The process has ended.
        """
        require_supported(kafka)
        self._toolchain = self._toolchain or await find_toolchain()
        security = await run_blocking(functools.partial(connector_options, kafka.security.in_use))
        security = with_registry(security, registry or SchemaRegistryConfig())
        plan = protocol.DriverPlan(
            # The driver of tasks has a JVM of its own in any case.
            spec=spec.model_copy(
                update={"kafka": PipelineKafka(), "driver": spec.driver.model_copy(update={"remote": None})}
            ),
            bootstrap_servers=kafka.bootstrap_servers,
            security=security.options,
            folder=self._folder,
            jars=self._toolchain.jars,
            java_flags=(*_QUICK, *self._toolchain.flags),
            task=task,
        )
        kept = self._driver if self._session == (spec.driver, security) else None
        if kept:
            (driver := kept).request(plan)
        else:
            await self._end()
            driver = self._driver = await DriverProcess.start(self, plan, self._toolchain, security)
            self._session = spec.driver, security
        response = await self._answer(driver)
        if isinstance(response, protocol.TaskResult):
            return response.result
        if not (response and response.stack):  # the process has ended
            code, output = await driver.exit_code(), driver.last_output()
            self._driver = None
            if kept:  # perhaps already between the task before and this one
                return await self.ask(file, spec, kafka, task, registry)
            if not response:
                text = f"The Spark driver ended with exit code {code}. Its last output: {output}"
                raise DriverLost(text, exit_code=code)
        text = refusal(response.text, kafka, spec) if response.error == protocol.KAFKA_REFUSES else response.text
        raise PipelineInvalid(self.sentence(file, {"part": response.part, "text": text, "stack": response.stack}))

    async def _answer(self, driver: DriverProcess) -> protocol.TaskResult | protocol.Failed | None:
        """Return the response to a task. A failure without a stack trace, or none at all, ends the process."""
        failed: protocol.Failed | None = None
        async for event in driver.events():
            if isinstance(event, protocol.TaskResult):
                return event
            if isinstance(event, protocol.Failed):
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


class TrialSpec(Section):
    """A file `tests/*.yaml` with a pipeline: given rows of its sources, and expected rows of its flows and views."""

    pipeline: str | None = None
    """Name of the file, if the folder has several."""
    given: dict[str, list[Any] | str] = {}
    """Source to its rows, to a CSV or JSON file with them, or to a list of these: the steps."""
    expect: dict[str, list[Any] | str]
    """Flow or view to its rows, or to a file. Columns that no row names are not compared."""
    streaming: bool = False
    """Whether each step is a micro-batch of a streaming query; the rows are then all that it writes."""
    ordered: bool = False
    """Whether the order of the rows counts."""

    def task(self, folder: Path) -> protocol.DriverTask:
        """Return the task, with the rows of the files in a folder."""
        given = {name: steps_of(value, folder) for name, value in self.given.items()}
        steps = {name: steps_of(value, folder) for name, value in self.expect.items()}
        expect = {name: [row for step in found for row in step] for name, found in steps.items()}
        return protocol.DriverTask(kind="trial", given=given, expect={**expect}, streaming=self.streaming)


def load_trial(file: Path) -> TrialSpec:
    """Return the given and expected rows of a file."""
    problems = Problems()
    tree = read_tree(read_text(file, PipelineInvalid, "Correct the path"), str(file), problems)
    spec = validated(TrialSpec, tree, problems)
    if problems.found or not spec:
        raise PipelineInvalid("\n".join(problems.ordered))
    return spec


def steps_of(value: list[Any] | str, folder: Path) -> list[protocol.Rows]:
    """Return rows, or what names them, as a list of steps."""
    if isinstance(value, str):
        text = read_text(folder / value, PipelineInvalid, "Correct the name")
        if len(text.encode()) > MAX_BYTES:
            raise PipelineInvalid(f"{folder / value}: is larger than {MAX_BYTES} bytes: give fewer rows")
        try:
            if value.endswith(".csv"):
                return [
                    [{name: _cell(cell) for name, cell in row.items()} for row in csv.DictReader(text.splitlines())]
                ]
            return [json.loads(text) if text.lstrip().startswith("[") else [*map(json.loads, text.splitlines())]]
        except ValueError as cause:
            raise PipelineInvalid(f"{folder / value}: holds no JSON rows: {cause}. Correct it") from cause
    if all(isinstance(row, dict) for row in value):
        return [value]
    return [step for each in value for step in steps_of(each, folder)]


def _cell(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text or None


def differences(actual: list[str], expected: list[str], *, ordered: bool = False) -> list[str]:
    """Return what differs between two lists of rows: `-` is missing, `+` was not expected; empty if nothing does."""
    if not ordered:
        actual, expected = sorted(actual), sorted(expected)
    return [] if actual == expected else [line.rstrip("\n") for line in difflib.ndiff(expected, actual)]
