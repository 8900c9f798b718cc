"""Runs a pipeline: keeps a driver process alive, replaces one that stalls, and reports its status."""

import asyncio
import contextlib
import functools
import logging
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.references import FileChanges
from headrace.config.topic_names import BATCHES_TOPIC
from headrace.errors import DriverLost, EnvironmentProblem, HeadraceError, PipelineInvalid, TopicNotFound
from headrace.kafka import Admin, InternalTopic
from headrace.pipelines import protocol
from headrace.pipelines.connector import (
    ConnectorSecurity,
    connector_options,
    for_server,
    refusal,
    require_supported,
    with_registry,
    write_secrets,
)
from headrace.pipelines.driver_process import DriverProcess, Toolchain, find_toolchain, require_spark
from headrace.pipelines.graph import require_cores, topics_written
from headrace.pipelines.spec import PipelineKafka, PipelineSpec
from headrace.pipelines.status import OffsetPublisher, PipelineStatus, RunStatus
from headrace.runtime import Clock, Deadline, Readiness, RestartPauses, Service, run_blocking
from headrace.runtime.gauge_registry import register_gauge

log = logging.getLogger(__name__)

_PREPARE_RETRY_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_STEADY_SECONDS = 60.0
_RENEW_SECONDS = 60.0
_PAUSE_SECONDS = 60.0
_PYTHON_ATTEMPTS = 5
_PYTHON_ADVICE = "Correct the code, filter such records out, or give Python more memory; then resume the pipeline"
_LOOK_SECONDS = 1.0
_START_SECONDS = 300.0
"""The least time without progress in which a start is no stall: Java, sources and checkpoints may need minutes."""
_PAUSED = "paused"
"""Name of the file in the pipeline's folder that keeps it paused over restarts of Headrace."""


class PipelineRun(Service):
    """A pipeline that runs until it is stopped: a driver that fails is started again from its checkpoint.

    An error that a further start would meet again (SQL, schema, checkpoint, removed records) ends it until `resume`;
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
        """Prepare a run, with a folder of its own in `state_dir` for checkpoints and logs.

        Raises:
            ConfigError: Java's Kafka client cannot do what the settings of TLS and login ask for.
        """
        super().__init__(f"pipeline {spec.name}")
        require_supported(kafka)
        self._spec = spec
        self._kafka, self._registry = kafka, registry
        self._folder = (state_dir / spec.name).absolute()
        self._clock = clock
        self._admin = admin
        self._publisher = OffsetPublisher(admin.alter_group_offsets, clock)
        self._status = RunStatus(spec.name, self.groups)
        self._driver: DriverProcess | None = None
        self._driver_ended = asyncio.Event()
        self._stopping = False
        self._security = kafka.security
        """TLS and login of the driver that runs."""
        self._renewing = False
        """Whether the driver ends on purpose, and another one is to start at once."""
        self._held = (self._folder / _PAUSED).exists()
        """Whether no driver is to run until `resume`."""
        self._resumed = asyncio.Event()
        self._moved: dict[str, float] = {}
        """When each flow was last seen to make progress; while it starts, when any part of the start ended."""
        self._began: dict[str, float] = {}
        """When each flow began to run that has not reported since."""
        self._python_failures: dict[str, int] = {}
        """How often Python code of each flow has failed since its last micro-batch."""
        self._partitions: dict[str, int] = {}
        """Topic to its partitions at the last start."""
        self._topic_ids: dict[str, str] = {}
        self._stall = ""
        """Which flow makes no progress, and since when."""

    async def start(self) -> None:
        """Begin to start the driver.

        Raises:
            EnvironmentProblem: pyspark is not installed.
        """
        require_spark(remote=bool(self._spec.driver.remote))
        self.keep(self._keep_running, "run")  # no driver is left when it fails: a full disk passes
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
    def _reason(self) -> str:
        """Why it is not ready; empty if it is."""
        return (self._driver and self._stall) or self._status.reason or self._stall

    def report(self) -> PipelineStatus:
        """Return how the run is: its state and reason, and per flow its progress, lag, counts and last error."""
        status, pid, now = self._status, self._driver.pid if self._driver else None, self._clock.monotonic()
        for name, flow in status.flows.items():
            began = self._began.get(name)
            flow.first_batch_seconds = None if began is None else now - began
        return PipelineStatus(self._spec.name, status.state, self._reason, status.restarts, pid, status.flows)

    def status(self) -> dict[str, Any]:
        """Return the report as mappings."""
        report = msgspec.structs.asdict(self.report())
        return {**report, "flows": {name: msgspec.structs.asdict(flow) for name, flow in report["flows"].items()}}

    async def hold(self, state: Literal["paused", "stopped"]) -> None:
        """End the driver after its micro-batches, until `resume`. A pause stays when Headrace starts again.

        Raises:
            EnvironmentProblem: The pause cannot be written; the pipeline runs.
        """
        if state == "paused":
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / _PAUSED).touch()
            except OSError as cause:
                text = f"{self._folder / _PAUSED} cannot be written ({cause.strerror}): correct that, and pause again"
                raise EnvironmentProblem(text) from cause
        self._held = True
        if self._driver:
            await self._driver.stop(Deadline(self._clock, _PAUSE_SECONDS))
            await self._driver_ended.wait()
        await self._publisher.flush()
        if self._held:  # `resume` was not called meanwhile
            self._status.become(state)

    def resume(self) -> None:
        """Start a driver again from the checkpoints; nothing happens if the pipeline runs."""
        (self._folder / _PAUSED).unlink(missing_ok=True)
        self._renewing = self._renewing or (self._held and self._driver is not None)
        self._held = False
        self._resumed.set()

    @property
    def groups(self) -> dict[str, str]:
        """Flow to the consumer group that shows its progress."""
        return {name: self._spec.group(name) for name in self._spec.running}

    def counts(self, flow: str) -> dict[str, int]:
        """Return how many records a flow has read, and how many of them were no row, since this process began."""
        found = self._status.flows[flow]
        return {"read": found.input_records, "corrupt": found.corrupt_records, "tombstone": found.tombstone_records}

    async def _keep_running(self) -> None:
        pauses = RestartPauses(self._clock, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)
        if self._held:
            self._status.become("paused")
        while not self._stopping:
            if self._held:
                self._resumed.clear()
                await self._resumed.wait()
            if not (plan := await self._prepared()) or self._held:
                continue
            pauses.started()
            try:
                await self._run_driver(*plan)
            except PipelineInvalid as cause:
                log.error("pipeline %s cannot run: %s", self._spec.name, cause)
                self._status.become("failed", cause.description)
                self._held = True
            except DriverLost as cause:
                if pauses.steady:
                    pauses.failures = 0
                pause = pauses.failed()
                log.warning("pipeline %s starts again in %g s: %s", self._spec.name, pause, cause)
                self._status.become("waiting", f"{cause.description.rstrip('.')}. Next start in {pause:g} s")
                await self._clock.sleep(pause)
            except Exception as cause:  # boundary: the user sees that nothing runs until this work begins again
                self._status.become("waiting", f"The run failed: {cause!r}")
                raise
            else:
                self._held = self._held or not self._renewing

    async def _watch_changes(self) -> None:
        """Start the driver again when a topic was created anew, or clients use changed TLS files or secrets.

        A start refuses positions of the earlier topic. A running client of Java keeps the secrets that it began with.
        """
        reported: KafkaSecurity | None = None
        while True:
            await self._clock.sleep(FileChanges.LOOK_SECONDS)
            ids: dict[str, str] = {}
            with contextlib.suppress(HeadraceError):  # the driver reports it, too
                ids = await self._admin.topic_ids(self._topic_ids if self._driver else (), "Read")
            driver, now = self._driver, self._kafka.security.in_use
            if driver and not self._renewing and {**self._topic_ids, **ids} != self._topic_ids:
                self._renewing = True
                driver.kill()  # at once: the micro-batch may have begun at the wrong records
            if not driver or self._renewing or now is self._security:
                continue
            try:
                await run_blocking(functools.partial(connector_options, now))
            except HeadraceError as cause:
                if now is not reported:
                    log.warning("pipeline %s keeps its TLS files and secrets: %s", self._spec.name, cause)
                reported = now
                continue
            log.info("pipeline %s takes up changed TLS files or secrets: its driver starts again", self._spec.name)
            self._renewing = True
            await driver.stop(Deadline(self._clock, _RENEW_SECONDS))

    async def _watch_stalls(self) -> None:
        """Report a flow that makes no progress, and replace the driver if that stays so."""
        trigger = self._spec.trigger
        batch = trigger.checkpoint_seconds if trigger.realtime else trigger.interval_seconds
        limit = self._spec.driver.stall_seconds + batch
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            if self._driver:
                self._driver.bound_output()
            now, before, self._stall = self._clock.monotonic(), self._stall, ""
            limits = {name: limit if self._runs(name) else max(limit, _START_SECONDS) for name in self._moved}
            late, flow = max((((now - at) / limits[name], name) for name, at in self._moved.items()), default=(0.0, ""))
            if not self._driver or late < 1:
                continue
            seconds = f"{late * limits[flow]:.0f} s"
            self._stall = f"flow {flow} has made no progress for {seconds}: no micro-batch and no task has ended"
            if not self._runs(flow):
                self._stall = f"flow {flow} does not begin to run: its start has made no progress for {seconds}"
            if not before:
                log.warning("pipeline %s: %s", self._spec.name, self._stall)
            if late >= 2:
                self._driver.kill()

    def _runs(self, flow: str) -> bool:
        return self._status.flows[flow].state == "running"

    async def _prepared(self) -> tuple[protocol.DriverPlan, Toolchain, ConnectorSecurity] | None:
        """Return what a driver needs once topics, Java and jars are there, and TLS files and secrets can be read."""
        while not self._held:
            try:
                for topic in {topic for source in self._spec.sources.values() for topic in source.topics}:
                    self._partitions[topic] = len((await self._admin.describe_topic(topic, "Read")).partitions)
                self._topic_ids = await self._admin.topic_ids(self._partitions, "Read")
                require_cores(self._spec, self._partitions)
                for topic, like in topics_written(self._spec).items():
                    await self._ensure_topic(topic, like)
                if self._spec.transactions:
                    await InternalTopic(BATCHES_TOPIC).ensure(self._admin)
                remote = self._spec.driver.remote
                toolchain = Toolchain((), None) if remote else await find_toolchain()
                in_use = self._kafka.security.in_use
                security = await run_blocking(functools.partial(connector_options, in_use))
                kafka = self._kafka.model_copy(update={"security": in_use}) if self._spec.transactions else None
                if kafka and "task" in self._spec.transactions:
                    security.secrets[protocol.KAFKA] = protocol.with_secrets(kafka)
                if self._spec.uses_registry:
                    security = with_registry(security, self._registry)
                security = for_server(security, self._folder) if remote else security
                self._security = in_use
            except HeadraceError as cause:
                if cause.description != self._status.reason:
                    log.warning("pipeline %s waits: %s", self._spec.name, cause)
                if not self._held:
                    self._status.become("waiting", cause.description)
                await self._clock.sleep(_PREPARE_RETRY_SECONDS)
            else:
                plan = protocol.DriverPlan(
                    spec=self._spec.model_copy(update={"kafka": PipelineKafka()}),
                    bootstrap_servers=self._kafka.bootstrap_servers,
                    security=security.options,
                    kafka=kafka,
                    folder=self._folder,
                    jars=toolchain.jars,
                    java_flags=toolchain.flags,
                    topic_ids=self._topic_ids,
                )
                return plan, toolchain, security
        return None

    async def _ensure_topic(self, topic: str, like: str) -> None:
        """Create a topic that flows write to; one that exists needs no right to create it."""
        try:
            await self._admin.describe_topic(topic, "Write")
        except TopicNotFound:
            if not self._kafka.create_topics:
                raise
            await self._admin.ensure_topic_like(topic, like)

    async def _run_driver(self, plan: protocol.DriverPlan, toolchain: Toolchain, security: ConnectorSecurity) -> None:
        """Run a driver process to its end. Returns if it had finished or was stopped, raises why it ended otherwise."""
        if self._stopping:
            return
        self._status.driver_started(renewed=self._renewing)
        self._driver_ended.clear()
        self._renewing = False
        failure: protocol.Failed | None = None
        try:
            try:
                driver = self._driver = await DriverProcess.start(self, plan, toolchain, security)
            except OSError as cause:  # a full disk, too many processes: both pass
                raise DriverLost(f"The Spark driver cannot be started: {cause.strerror or cause}.") from cause
            self._moved = dict.fromkeys(self._spec.running, self._clock.monotonic())
            if self._held or self._stopping:
                driver.kill()
            async for event in driver.events():
                if isinstance(event, protocol.Failed) and event.error == protocol.KAFKA_REFUSES:
                    event = msgspec.structs.replace(event, text=refusal(event.text, self._kafka, self._spec))
                self._status.apply(event)
                if isinstance(
                    event, protocol.SessionReady
                ):  # another process had the folder until now, and its secrets
                    write_secrets(self._folder, security.secrets, shared=self._spec.driver.on_cluster)
                self._note_progress(event)
                if isinstance(event, protocol.FlowProgress):
                    self._python_failures.pop(f"flows.{event.flow}", None)
                    self._check_growth(event, driver)
                    self._publisher.add(self._spec.group(event.flow), event.positions)
                if isinstance(event, protocol.Failed):
                    failure = self._bounded(event)
            code = await driver.exit_code()
        except OSError as cause:
            raise DriverLost(f"The folder of the pipeline cannot be written: {cause.strerror or cause}.") from cause
        finally:
            if self._driver:
                self._driver.kill()
            self._driver = None
            self._driver_ended.set()
            self._moved.clear()
            self._began.clear()
            if not self._status.waits_for_folder:
                write_secrets(self._folder, {})  # the last step, because a broken folder ends it with an error
        if self._stopping or self._held or self._renewing or self._status.state == "finished":
            return
        if self._stall and not failure:
            raise DriverLost(f"The Spark driver was replaced: {self._stall}", pipeline=self._spec.name)
        raise _as_error(self._spec.name, failure, code, driver.last_output())

    def _bounded(self, failure: protocol.Failed) -> protocol.Failed:
        """Return the failure; one of Python code is lasting when it has come too often in the same micro-batch.

        Each further attempt could write the rows of the micro-batch again.
        """
        if failure.error != protocol.PYTHON_FAILED:
            return failure
        failures = self._python_failures[failure.part] = self._python_failures.get(failure.part, 0) + 1
        if failures < _PYTHON_ATTEMPTS:
            return failure
        del self._python_failures[failure.part]
        text = f"{failure.text}\nIt failed {failures} times in the same micro-batch. {_PYTHON_ADVICE}"
        return msgspec.structs.replace(failure, text=text, retriable=False)

    def _check_growth(self, event: protocol.FlowProgress, driver: DriverProcess) -> None:
        """End a driver in real-time mode whose topics have more partitions than at its start: it may not read them."""
        grown = [topic for topic, found in event.positions.items() if len(found) > self._partitions.get(topic, 0)]
        if grown and self._spec.trigger.realtime and not self._renewing:
            log.info("pipeline %s starts again, because topic %s has more partitions", self._spec.name, grown[0])
            self._renewing = True
            driver.kill()

    def _note_progress(self, event: protocol.AnyEvent) -> None:
        if isinstance(event, protocol.FlowRunning):
            self._began[event.flow] = self._clock.monotonic()
        elif isinstance(event, protocol.FlowProgress):
            self._began.pop(event.flow, None)
        match event:
            case protocol.FolderInUse():  # another process may have it for as long as it lives
                self._moved.clear()
            case protocol.SessionReady():
                self._moved = dict.fromkeys(self._spec.running, self._clock.monotonic())
            case protocol.FlowFinished(flow=name) | protocol.FlowFailed(flow=name):
                self._moved.pop(name, None)
                self._began.pop(name, None)
            case protocol.FlowProgress(flow=name, input_records=0, lag_records=int(lag)) if lag and name in self._moved:
                pass  # there are records, and none was read
            case protocol.FlowRunning(flow=name) | protocol.FlowProgress(flow=name) | protocol.FlowWorking(flow=name):
                self._moved[name] = self._clock.monotonic()
                if isinstance(event, protocol.FlowRunning):  # flows are started one after the other
                    self._moved |= {each: self._moved[name] for each in self._moved if not self._runs(each)}


def _as_error(pipeline: str, failure: protocol.Failed | None, code: int, last_output: str) -> HeadraceError:
    if failure is None:
        text = f"The Spark driver of pipeline {pipeline} ended with exit code {code}."
        text += f" Its last output: {last_output}" if last_output else ""
        return DriverLost(text, pipeline=pipeline, exit_code=code)
    where = f"pipeline {pipeline}, {failure.part}" if failure.part else f"pipeline {pipeline}"
    kind = DriverLost if failure.retriable else PipelineInvalid
    return kind(f"{where}: {failure.error}: {failure.text}", pipeline=pipeline, part=failure.part)
