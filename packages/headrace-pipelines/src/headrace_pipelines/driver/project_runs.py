"""Runs a project of Spark Declarative Pipelines: one run after the other, because Spark itself only has single runs.

The JVM of this process is the Spark Connect server of the process with the definitions. Spark's streaming queries run
in this JVM, so their progress is read here.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace_pipelines.driver.failures import PartFailed
from headrace_pipelines.driver.progress import ProgressReader
from headrace_pipelines.driver.run_events import RUN_FAILED, ProjectFile, RunEnded, RunEvents, SparkText
from headrace_pipelines.driver_protocol import DriverPlan, Failed, FlowFinished, FlowWorking, SendEvent
from headrace_pipelines.spark_project import SparkProject

_PAUSE_SECONDS = 1.0
"""From the end of a run to the beginning of the next one."""
_POLL_SECONDS = 0.1
_WORK_SECONDS = 5.0


def run_project(spark: SparkSession, plan: DriverPlan, project: SparkProject, send: SendEvent) -> None:
    """Run the project again and again until SIGTERM; its queries then end after their micro-batches.

    Raises:
        PartFailed: A run failed.
    """
    stopping: list[int] = []  # not an Event: a second signal could wait for its lock for ever
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    known = set[str]()
    with _definitions(spark, project) as child:
        while not stopping:
            run = RunEvents(project.flow_name)
            queries = FlowQueries(spark, plan, project, send)
            for text in child.run("run"):
                for event in run.apply(text):
                    send(event)
                queries.report(run)
                if stopping and queries.stopped():
                    return
            queries.report(run)
            if stopping:  # a stopped query may be a failure to Spark
                return
            if failure := run.failure(child.failed):
                raise PartFailed.of(failure)
            for flow in known - run.states.keys():  # an edit has removed it
                send(FlowFinished(flow))
            known = {*run.states}
            until = time.monotonic() + _PAUSE_SECONDS
            while time.monotonic() < until and not stopping:
                time.sleep(_POLL_SECONDS)


def dry_run(spark: SparkSession, project: SparkProject) -> dict[str, Any]:
    """Let Spark resolve the project without running it, and return what it says.

    Raises:
        PartFailed: Spark refuses it.
    """
    run, texts = RunEvents(project.flow_name), list[str]()
    with _definitions(spark, project) as child:
        for text in child.run("dry"):
            list(run.apply(text))
            texts += [text] if text else []
        if failure := run.failure(child.failed):
            raise PartFailed.of(failure)
    return {"texts": texts}


class FlowQueries:
    """The streaming queries of one run, by what Spark knows of all sessions of this JVM."""

    def __init__(self, spark: SparkSession, plan: DriverPlan, project: SparkProject, send: SendEvent) -> None:
        self._spark = spark
        self._plan = plan
        self._project = project
        self._send = send
        self._readers: dict[str, ProgressReader] = {}
        """The queries that were active at the last look, by the id of their run."""
        self._work = 0
        """Completed tasks of the active stages."""
        self._next_look = time.monotonic() + _WORK_SECONDS

    def report(self, run: RunEvents) -> None:
        """Report new queries, completed micro-batches, and tasks that have completed."""
        java: Any = self._spark._jvm
        active = java.java.util.HashMap(self._spark._jsparkSession.sharedState().activeStreamingQueries())
        for query in active.values():
            run_id = str(query.runId())
            if run_id not in self._readers:
                flow = self._project.flow_name(str(query.name()))
                self._readers[run_id] = ProgressReader(self._plan, StreamingQuery(query), None, self._send, flow)
        for run_id, reader in list(self._readers.items()):
            ended = not reader.query.isActive
            reader.report()
            if ended:
                del self._readers[run_id]
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _WORK_SECONDS
            tracker = self._spark.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            work = sum(stage.stageId + stage.numCompletedTasks for stage in stages if stage)
            if work != self._work:  # also for a flow that has completed, because the run has not
                self._work = work
                for flow in run.states:
                    self._send(FlowWorking(flow))

    def stopped(self) -> bool:
        """Stop each query that is between two micro-batches. Returns whether none is left."""
        for run_id, reader in list(self._readers.items()):
            if reader.between_batches or not reader.query.isActive:
                with contextlib.suppress(Exception):  # boundary: after its time limit, the end of the JVM stops it
                    reader.query.stop()
                reader.report()
                del self._readers[run_id]
        return not self._readers


class Definitions:
    """The running process with the definitions."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        assert process.stdout
        self._requests, self._responses = process.stdin, process.stdout.fileno()
        self._decoder = msgspec.json.Decoder(SparkText | RunEnded)
        self._buffer = b""
        self.failed: Failed | None = None
        """Why the last run failed; None if it did not."""

    def request(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the end of its output is noticed next
            self._requests.write(line + b"\n")
            self._requests.flush()

    def run(self, request: str) -> Iterator[str]:
        """Request a run, and yield Spark's texts until its end; an empty text whenever there is none for a while."""
        self.failed = None
        self.request(request.encode())
        while True:
            if not select.select([self._responses], [], [], _POLL_SECONDS)[0]:
                yield ""
                continue
            if not (read := os.read(self._responses, 65_536)):
                text = "the process with the definitions has ended; standard error of the driver may say why"
                self.failed = Failed(RUN_FAILED, text, retriable=True)
                return
            *lines, self._buffer = (self._buffer + read).split(b"\n")
            for line in lines:
                response = self._decoder.decode(line)
                if isinstance(response, RunEnded):
                    self.failed = response.failed
                    return
                yield response.text


@contextlib.contextmanager
def _definitions(spark: SparkSession, project: SparkProject) -> Iterator[Definitions]:
    """Give the process with the definitions, and end it afterwards."""
    service = getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")  # type: ignore[union-attr]
    port = getattr(service, "MODULE$").localPort()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace_pipelines.driver.definitions"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # With a token Spark's client demands TLS of every host but this name.
        env={**own, "SPARK_REMOTE": f"sc://localhost:{port}"},
    ) as process:
        try:
            child = Definitions(process)
            document = project.document | {"configuration": _of_sessions(spark, project.configuration)}
            child.request(msgspec.json.encode(ProjectFile(str(project.file), document)))
            yield child
        finally:
            process.kill()


def _of_sessions(spark: SparkSession, configuration: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a session takes. Spark refuses others for each flow, and the JVM has begun with them."""
    found = dict(configuration)
    trial = spark.newSession().conf
    for name, value in configuration.items():
        try:
            trial.set(name, value)
        except PySparkException as cause:
            if str(cause.getCondition()).startswith("CANNOT_MODIFY"):
                del found[name]
    return found
