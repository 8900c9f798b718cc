"""The driver process: starts a session and the flows, reports their progress, and ends at SIGTERM or when one fails.

A flow whose checkpoint is unusable fails alone; the driver ends when no other flow is left.

With another task than `run` the process answers requests until its standard input ends. It has one thread. Before the
flows run, SIGTERM ends it at once; after that, each flow finishes its micro-batch first.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from typing import IO

import msgspec
from pyspark.sql import SparkSession

from headrace.errors import CheckpointUnusable
from headrace_pipelines import driver_protocol
from headrace_pipelines.checkpoints import progressed
from headrace_pipelines.driver.failures import PartFailed, failure_event, part
from headrace_pipelines.driver.flows import end_batches, start_flow
from headrace_pipelines.driver.progress import ProgressReader
from headrace_pipelines.driver.project_runs import run_project
from headrace_pipelines.driver.session import spark_session
from headrace_pipelines.driver.source_tables import register_source
from headrace_pipelines.driver.tasks import serve_requests
from headrace_pipelines.driver.views import register_view
from headrace_pipelines.graph import ordered_views
from headrace_pipelines.spark_project import SparkProject

_POLL_SECONDS = 0.1
_WORK_SECONDS = 5.0
_STOP_POLL_SECONDS = 0.02


def main() -> int:
    """Do the tasks on standard input. Returns the exit code."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    send = _events(_take_standard_output())
    plan = driver_protocol.DriverPlan.model_validate_json(sys.stdin.readline())
    try:
        with spark_session(plan, lambda owner: send(driver_protocol.FolderInUse(owner))) as spark, part(""):
            send(driver_protocol.SessionReady(round(time.monotonic() - began, 2)))
            if plan.task.kind == "run" and isinstance(plan.spec, SparkProject):
                run_project(spark, plan, plan.spec, send)
            elif plan.task.kind == "run":
                _register(spark, plan)
                run_flows(spark, plan, send)
            else:
                serve_requests(spark, plan, sys.stdin, send)
    except PartFailed as failure:
        send(failure.event)
        return 1
    except Exception as cause:  # noqa: BLE001 boundary of the process: the pipeline's status shows this text
        traceback.print_exc()
        send(failure_event(cause, ""))
        return 1
    return 0


def _take_standard_output() -> IO[bytes]:
    """Keep standard output for events alone: what Spark, the JVM or a library prints goes to standard error."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def _events(stream: IO[bytes]) -> driver_protocol.SendEvent:
    encoder = msgspec.json.Encoder()

    def send(event: driver_protocol.DriverEvent) -> None:
        stream.write(encoder.encode(event) + b"\n")

    return send


def run_flows(spark: SparkSession, plan: driver_protocol.DriverPlan, send: driver_protocol.SendEvent) -> None:
    """Run the flows until SIGTERM, or until none is left.

    Raises:
        PartFailed: A part failed, and no other flow can continue.
    """
    stopping: list[int] = []  # not an Event: a second signal could wait for its lock for ever
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    active: dict[str, ProgressReader] = {}
    failed: list[PartFailed] = []

    def fail(name: str, failure: PartFailed) -> None:
        """Let the other flows continue if the cause is the checkpoint of this one."""
        if failure.event.error != CheckpointUnusable.message:
            raise failure
        failed.append(failure)
        send(driver_protocol.FlowFailed(name, failure.event.error, failure.event.text))

    for name in plan.spec.running:
        try:
            with part(f"flows.{name}"):
                active[name] = ProgressReader(plan, *start_flow(spark, plan, name), send)
        except PartFailed as failure:
            fail(name, failure)
    recorded = set[str]()
    next_look = 0.0
    while active and not stopping:
        for name, reader in list(active.items()):
            ended = not reader.query.isActive
            if reader.report() and reader.batch_id >= 0 and name not in recorded:
                progressed(plan.folder, name, reader.batch_id)
                recorded.add(name)
            if ended:
                del active[name]
                if (cause := reader.failure) is not None:
                    fail(name, PartFailed(cause, f"flows.{name}"))
                else:
                    send(driver_protocol.FlowFinished(name))
        if time.monotonic() >= next_look and not plan.spec.driver.remote:
            next_look = time.monotonic() + _WORK_SECONDS
            for reader in active.values():
                reader.report_work(spark.sparkContext.statusTracker())
        time.sleep(_POLL_SECONDS)
    if failed and not stopping:  # no flow is left
        raise failed[0]
    if plan.spec.trigger.realtime and not plan.spec.driver.remote:
        end_batches(spark)
    _stop(active)


def _register(spark: SparkSession, plan: driver_protocol.DriverPlan) -> None:
    """Register the sources, then the views of the file."""
    for name in plan.spec.sources:
        with part(f"sources.{name}"):
            register_source(spark, plan, name)
    for name in ordered_views(plan.spec):
        with part(f"views.{name}"):
            register_view(spark, plan, name)


def _stop(active: dict[str, ProgressReader]) -> None:
    """Stop every flow after its present micro-batch: one that is cut would write its rows again."""
    while active:
        for name, reader in list(active.items()):
            if reader.report() or reader.between_batches or not reader.query.isActive:
                with contextlib.suppress(Exception):  # boundary: after its time limit, the end of the JVM stops it
                    reader.query.stop()
                reader.report()
                del active[name]
        time.sleep(_STOP_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
