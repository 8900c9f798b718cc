"""Runs a pipeline: keeps a driver process alive, replaces one that stalls, and reports its status."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.references import FileChanges
from headrace.errors import DriverLost, EnvironmentProblem, HeadraceError, PipelineInvalid
from headrace.extras import require
from headrace.kafka import Admin
from headrace.runtime import Clock, Deadline, Readiness, RestartPauses, Service
from headrace.runtime.gauge_registry import register_gauge
from headrace_pipelines import driver_protocol
from headrace_pipelines.connector import write_secrets
from headrace_pipelines.driver_inputs import DriverInputs, InputSource
from headrace_pipelines.driver_process import DriverProcess, require_spark
from headrace_pipelines.flow_watch import FlowWatch
from headrace_pipelines.micro_batch_span import trace_micro_batch
from headrace_pipelines.report import PipelineStatus
from headrace_pipelines.spark_project import SparkProject
from headrace_pipelines.spec import PipelineSpec
from headrace_pipelines.status import OffsetPublisher, RunStatus

log = logging.getLogger(__name__)

_PREPARE_RETRY_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_STEADY_SECONDS = 60.0
_REPLACE_SECONDS = 60.0
_PAUSE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_PAUSED = "paused"
"""Name of the file in the pipeline's folder that keeps it paused over restarts of Headrace."""


class PipelineRun(Service):
    """A pipeline that runs until it is stopped: a driver that fails is started again from its checkpoint.

    An error that a restart would only repeat (SQL, schema, checkpoint, removed records) ends it until `resume`;
    readiness then has the reason.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        kafka: KafkaConfig,
        state_dir: Path,
        clock: Clock,
        admin: Admin,
        registry: SchemaRegistryConfig = SchemaRegistryConfig(),  # noqa: B008 immutable
    ) -> None:
        """Prepare a run, with its own folder in `state_dir` for checkpoints and logs.

        Raises:
            ConfigError: Java's Kafka client cannot do what the settings of TLS and login ask for.
        """
        super().__init__(f"pipeline {spec.name}")
        # Settings
        self._spec = spec
        self._clock = clock
        self._source = InputSource(spec, kafka, registry, (state_dir / spec.name).absolute(), admin)
        # What is known and reported
        self._publisher = OffsetPublisher(admin.alter_group_offsets, clock)
        self._status = RunStatus(
            spec.name, self.groups, {name: flow.sink.described for name, flow in spec.running.items()}
        )
        self._flows = FlowWatch(spec, self._status, clock)
        # What operators want
        self._stopping = False
        self._resumed = asyncio.Event()
        """Set while a driver may run; not set from `hold` to `resume`."""
        if not (self._source.folder / _PAUSED).exists():
            self._resumed.set()
        # This driver
        self._driver: DriverProcess | None = None
        self._driver_ended = asyncio.Event()
        self._inputs: DriverInputs | None = None
        """What it was started with; while none runs, what the last one was started with."""
        self._replacing = False
        """Whether it is ended on purpose, and another one starts at once."""

    async def start(self) -> None:
        """Begin to start the driver.

        Raises:
            EnvironmentProblem: pyspark, or the package that a sink needs, is not installed.
        """
        require_spark(remote=bool(self._spec.driver.remote))
        if isinstance(self._spec, SparkProject):
            require("connect", "a project of Spark Declarative Pipelines")
        for flow in self._spec.running.values():
            if flow.sink.requires:
                require(*flow.sink.requires)
        self.keep(
            self._keep_running, "run"
        )  # if it fails, no driver is left, and the cause may pass, such as a full disk
        self.keep(self._publisher.run, "offsets")
        self.keep(self._watch_stalls, "stalls")
        register_gauge(
            "headrace_pipeline_restarts_total", lambda: float(self._status.restarts), pipeline=self._spec.name
        )
        self.keep(self._watch_changes, "changes")

    async def drain(self, deadline: Deadline) -> None:
        self._stopping = True
        if self._driver:
            await self._driver.stop(deadline)
            await self._driver_ended.wait()  # its last events are read by then
        await self._publisher.flush()

    async def stop(self) -> None:
        self._stopping = True
        driver = self._driver
        await self.cancel_tasks()
        if driver:
            driver.kill()
            await driver.exit_code()
        self._status.become("stopped", "stopped")

    def readiness(self) -> Readiness:
        reason = self._reason
        return Readiness(not reason, reason or self._publisher.problem)

    @property
    def _on_hold(self) -> bool:
        """Whether it is paused or stopped, so that no driver runs until `resume`."""
        return not self._resumed.is_set()

    @property
    def _reason(self) -> str:
        """Why it is not ready; empty if it is."""
        return (self._driver and self._flows.stall) or self._status.reason or self._flows.stall

    def report(self) -> PipelineStatus:
        """Return state and reason of the run, and per flow its progress, lag, counts and last error."""
        status, pid = self._status, self._driver.pid if self._driver else None
        for name, flow in status.flows.items():
            flow.first_batch_seconds = self._flows.first_batch_seconds(name)
        return PipelineStatus(self._spec.name, status.state, self._reason, status.restarts, pid, status.flows)

    def status(self) -> dict[str, Any]:
        """Return the report as mappings."""
        report = msgspec.structs.asdict(self.report())
        return {**report, "flows": {name: msgspec.structs.asdict(flow) for name, flow in report["flows"].items()}}

    async def hold(self, state: Literal["paused", "stopped"]) -> None:
        """End the driver after its micro-batches, until `resume`. A pause outlasts restarts of Headrace.

        Raises:
            EnvironmentProblem: The pause cannot be written; the pipeline continues.
        """
        if state == "paused":
            mark = self._source.folder / _PAUSED
            try:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as cause:
                text = f"{mark} cannot be written ({cause.strerror}): correct that, and pause again"
                raise EnvironmentProblem(text) from cause
        self._resumed.clear()
        if self._driver:
            await self._driver.stop(Deadline(self._clock, _PAUSE_SECONDS))
            await self._driver_ended.wait()
        await self._publisher.flush()
        if self._on_hold:  # `resume` was not called meanwhile
            self._status.become(state)

    def resume(self) -> None:
        """Start a driver again from the checkpoints; nothing happens if the pipeline runs."""
        (self._source.folder / _PAUSED).unlink(missing_ok=True)
        self._replacing = self._replacing or (self._on_hold and self._driver is not None)
        self._resumed.set()

    @property
    def groups(self) -> dict[str, str]:
        """Flow to the consumer group that shows its progress."""
        return {name: self._spec.group(name) for name in self._spec.running}

    def watch_flows(self, add: Callable[[str, str], None]) -> None:
        """Call a function with each flow and its group; with those of a project when Spark first names them."""
        self._status.on_flow = add
        for flow, group in self.groups.items():
            add(flow, group)

    def counts(self, flow: str) -> dict[str, int]:
        """Return how many records a flow has read since this process began, and how many of them were dropped."""
        found = self._status.flows[flow]
        return {"read": found.input_records, "corrupt": found.corrupt_records, "tombstone": found.tombstone_records}

    async def _keep_running(self) -> None:
        pauses = RestartPauses(self._clock, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)
        if self._on_hold:
            self._status.become("paused")

        async def live() -> bool:
            await self._resumed.wait()
            inputs = await self._inputs_when_there()
            if inputs is None or self._on_hold:
                return not self._stopping
            pauses.started()
            try:
                await self._run_driver(inputs)
            except PipelineInvalid as cause:
                log.error("pipeline %s cannot run: %s", self._spec.name, cause)
                self._status.become("failed", cause.description)
                self._resumed.clear()
            else:
                if not self._replacing:
                    self._resumed.clear()
            return not self._stopping

        def lost(cause: Exception, pause: float) -> None:
            log.warning("pipeline %s: restarting in %g s: %s", self._spec.name, pause, cause)
            self._status.become("waiting", f"{str(cause).rstrip('.')}. Next start in {pause:g} s")

        try:
            await pauses.keep(live, lost, DriverLost)
        except Exception as cause:  # boundary: the status shows that nothing runs until this work is restarted
            self._status.become("waiting", f"The run failed: {cause!r}")
            raise

    async def _watch_changes(self) -> None:
        """Replace the driver when a topic was deleted and created again, or clients use changed TLS files or secrets.

        A start rejects positions of the earlier topic. A running client of Java keeps the secrets that it began with.
        """
        reported: KafkaSecurity | None = None
        while True:
            await self._clock.sleep(FileChanges.LOOK_SECONDS)
            driver, inputs = self._driver, self._inputs
            if not driver or not inputs:
                continue
            if await self._source.is_topic_recreated(inputs) and driver is self._driver and not self._replacing:
                self._replacing = True
                driver.kill()  # without a drain: the micro-batch may have begun at the wrong records
            now = self._source.security_now()
            if driver is not self._driver or self._replacing or now is inputs.in_use:
                continue
            try:
                await self._source.check_security()
            except HeadraceError as cause:
                if now is not reported:
                    log.warning(
                        "pipeline %s: rejected changed TLS files or secrets; keeping the old ones, will retry: %s",
                        self._spec.name,
                        cause,
                    )
                reported = now
                continue
            log.info("pipeline %s: TLS files or secrets have changed; restarting its driver", self._spec.name)
            self._replacing = True
            await driver.stop(Deadline(self._clock, _REPLACE_SECONDS))

    async def _watch_stalls(self) -> None:
        """Report a flow that makes no progress, and replace the driver if it stays stalled."""
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            if not self._driver:
                self._flows.stall = ""
                continue
            self._driver.bound_output()
            before = self._flows.stall
            must_replace = self._flows.look()
            if self._flows.stall and not before:
                log.warning("pipeline %s: %s", self._spec.name, self._flows.stall)
            if must_replace:
                self._driver.kill()

    async def _inputs_when_there(self) -> DriverInputs | None:
        """Return what a driver needs once all of it is there; None if the pipeline is paused meanwhile."""
        while not self._on_hold:
            try:
                self._inputs = await self._source.read()
                return self._inputs
            except HeadraceError as cause:
                if cause.description != self._status.reason:
                    log.warning("pipeline %s: waiting: %s", self._spec.name, cause)
                if not self._on_hold:
                    self._status.become("waiting", cause.description)
                await self._clock.sleep(_PREPARE_RETRY_SECONDS)
        return None

    async def _run_driver(self, inputs: DriverInputs) -> None:
        """Run a driver process to its end. Returns if it finished or was stopped; otherwise raises why it ended."""
        if self._stopping:
            return
        self._status.driver_started(planned=self._replacing)
        self._driver_ended.clear()
        self._replacing = False
        failure: driver_protocol.Failed | None = None
        try:
            try:
                driver = self._driver = await DriverProcess.start(self, inputs.plan, inputs.toolchain, inputs.security)
            except OSError as cause:  # a full disk or too many processes, which may pass
                raise DriverLost(f"The Spark driver failed to start: {cause.strerror or cause}.") from cause
            self._flows.driver_started()
            if self._on_hold or self._stopping:
                driver.kill()
            async for reported in driver.events():
                event = self._source.explained(reported)
                if (flow := str(getattr(event, "flow", ""))) and flow not in self._status.flows:
                    self._status.add_flow(flow, self._spec.group(flow))  # of a project: Spark names its flows
                self._status.apply(event)
                if isinstance(
                    event, driver_protocol.SessionReady
                ):  # until now another process may have used the folder
                    write_secrets(self._source.folder, inputs.security.secrets, shared=self._spec.driver.on_cluster)
                self._flows.on_event(event)
                if isinstance(event, driver_protocol.FlowProgress):
                    trace_micro_batch(self._spec.name, event)
                    self._check_growth(event, driver, inputs)
                    self._publisher.add(self._spec.group(event.flow), event.positions)
                if isinstance(event, driver_protocol.Failed):
                    failure = self._flows.bounded(event)
            code = await driver.exit_code()
        except OSError as cause:
            raise DriverLost(f"The folder of the pipeline cannot be written: {cause.strerror or cause}.") from cause
        finally:
            if self._driver:
                self._driver.kill()
            self._driver = None
            self._driver_ended.set()
            self._flows.driver_ended()
            if not self._status.waits_for_folder:
                write_secrets(self._source.folder, {})  # the last step, because a broken folder ends it with an error
        if self._stopping or self._on_hold or self._replacing or self._status.state == "finished":
            return
        if self._flows.stall and not failure:
            raise DriverLost(f"The Spark driver was replaced: {self._flows.stall}", pipeline=self._spec.name)
        raise _as_error(self._spec.name, failure, code, driver.last_output())

    def _check_growth(self, event: driver_protocol.FlowProgress, driver: DriverProcess, inputs: DriverInputs) -> None:
        """Replace a driver in real-time mode when a topic has new partitions, which it may not read."""
        grown = [topic for topic, found in event.positions.items() if len(found) > inputs.partitions.get(topic, 0)]
        if grown and self._spec.trigger.realtime and not self._replacing:
            log.info("pipeline %s: topic %s has more partitions; restarting its driver", self._spec.name, grown[0])
            self._replacing = True
            driver.kill()


def _as_error(pipeline: str, failure: driver_protocol.Failed | None, code: int, last_output: str) -> HeadraceError:
    if failure is None:
        text = f"The Spark driver of pipeline {pipeline} ended with exit code {code}."
        text += f" Its last output: {last_output}" if last_output else ""
        return DriverLost(text, pipeline=pipeline, exit_code=code)
    where = f"pipeline {pipeline}, {failure.part}" if failure.part else f"pipeline {pipeline}"
    kind = DriverLost if failure.retriable else PipelineInvalid
    return kind(f"{where}: {failure.error}: {failure.text}", pipeline=pipeline, part=failure.part)
