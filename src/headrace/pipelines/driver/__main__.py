"""The driver process: starts a session and the flows, reports their progress, and ends at SIGTERM or when one fails.

It has one thread. SIGTERM before the flows run ends it at once; after that, each flow finishes its micro-batch first.
"""

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import IO

import msgspec
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import SparkSession

from headrace.errors import PipelineInvalid
from headrace.pipelines.driver import plan as wire
from headrace.pipelines.driver.progress import ProgressReader
from headrace.pipelines.driver.session import spark_session
from headrace.pipelines.driver.topics import register_source, start_flow
from headrace.pipelines.graph import ordered_views

_POLL_SECONDS = 0.1
_STOP_POLL_SECONDS = 0.02
_LINES = 4
_REPORT = re.compile(r"(?:Caused by: )?(?:\w+\.)+(\w+(?:Exception|Error): .*)")
_REPORT_LENGTH = 4000


class _PartFailed(Exception):
    """A part of the pipeline failed; holds its event, made while the JVM still answers."""

    def __init__(self, cause: Exception, part: str) -> None:
        super().__init__(part)
        self.event = failure_event(cause, part)


def main() -> int:
    """Run the plan on standard input. Returns the exit code."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    send = _events(_take_standard_output())
    plan = wire.DriverPlan.model_validate_json(sys.stdin.read())
    try:
        with spark_session(plan) as spark:
            send(wire.SessionReady(round(time.monotonic() - began, 2)))
            _run(spark, plan, send)
    except _PartFailed as failure:
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


def _events(stream: IO[bytes]) -> wire.SendEvent:
    encoder = msgspec.json.Encoder()

    def send(event: wire.DriverEvent) -> None:
        stream.write(encoder.encode(event) + b"\n")

    return send


def _run(spark: SparkSession, plan: wire.DriverPlan, send: wire.SendEvent) -> None:
    spec = plan.spec
    for name in spec.sources:
        with _part(f"sources.{name}"):
            register_source(spark, plan, name)
    for name in ordered_views(spec):
        with _part(f"views.{name}"):
            spark.sql(spec.views[name]).createOrReplaceTempView(name)
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    active = {}
    for name in spec.flows:
        with _part(f"flows.{name}"):
            active[name] = ProgressReader(start_flow(spark, plan, name), send)
    while active and not stopping:
        for name, reader in list(active.items()):
            ended = not reader.query.isActive
            reader.report()
            if ended:
                if (cause := reader.query.exception()) is not None:
                    raise _PartFailed(cause, f"flows.{name}")
                send(wire.FlowFinished(name))
                del active[name]
        time.sleep(_POLL_SECONDS)
    _stop(active)


@contextlib.contextmanager
def _part(path: str) -> Iterator[None]:
    try:
        yield
    except (PySparkException, PipelineInvalid) as cause:
        raise _PartFailed(cause, path) from cause


def _stop(active: dict[str, ProgressReader]) -> None:
    """Stop every flow after the micro-batch it is in; one that is cut would write its rows again."""
    while active:
        for name, reader in list(active.items()):
            if reader.report() or reader.between_batches or not reader.query.isActive:
                with contextlib.suppress(Exception):  # boundary: past its time limit, the end of the JVM ends it
                    reader.query.stop()
                reader.report()
                del active[name]
        time.sleep(_STOP_POLL_SECONDS)


def _refused(cause: BaseException) -> str:
    """Return what Java's exceptions report, in one line, if Kafka refuses this client; otherwise an empty text."""
    # The error of a query has no trace of its own causes; that of its cause has.
    traces = [getattr(each, "_stackTrace", None) or "" for each in (cause, getattr(cause, "_cause", None))]
    reports = [found[1] for trace in traces for line in trace.splitlines() if (found := _REPORT.match(line))]
    text = "; ".join(dict.fromkeys(reports))
    return text[found.start() :][:_REPORT_LENGTH] if (found := wire.REFUSED.search(text)) else ""


def failure_event(cause: Exception, part: str) -> wire.Failed:
    """Return the event of an error: its first lines, without values of records."""
    name = type(cause).__name__
    if isinstance(cause, PySparkException):
        with contextlib.suppress(Exception):  # boundary: the JVM may be gone, and the exception's own name must do
            name = cause.getCondition() or name
    lines = [line for line in str(cause).partition("=== Streaming Query ===")[0].splitlines() if line.strip()]
    if isinstance(cause, ParseException | PipelineInvalid):
        return wire.Failed(name, "\n".join(lines[:_LINES]), retriable=False, part=part)
    if isinstance(cause, AnalysisException):  # after its first line comes the query's plan
        return wire.Failed(name, "\n".join(lines[:1]), retriable=False, part=part)
    if refused := _refused(cause):
        return wire.Failed(wire.KAFKA_REFUSES, refused, retriable=True, part=part)
    # Spark quotes values of records in single quotes.
    text = "\n".join(re.sub(r"'.*'", "'...'", line) for line in lines[:_LINES])
    return wire.Failed(name, text, retriable=True, part=part)


if __name__ == "__main__":
    sys.exit(main())
