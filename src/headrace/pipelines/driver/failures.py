"""Errors of Spark and of user code as events: their first lines, without values of records."""

import contextlib
import re
from collections.abc import Iterator

from pyspark.errors import AnalysisException, ParseException, PySparkException

from headrace.errors import PipelineInvalid
from headrace.pipelines.driver import plan as wire

_LINES = 4
_REPORT = re.compile(r"(?:Caused by: )?(?:\w+\.)+(\w+(?:Exception|Error): .*)")
_REPORT_LENGTH = 4000
_RAISED = re.compile(r"\[(USER_RAISED_EXCEPTION)\] (.*?)(?:SQLSTATE|\n|$)")


class PartFailed(Exception):
    """A part of the pipeline failed; holds its event, made while the JVM still answers."""

    def __init__(self, cause: Exception, part: str) -> None:
        super().__init__(part)
        self.event = failure_event(cause, part)


@contextlib.contextmanager
def part(path: str) -> Iterator[None]:
    """Name the part of the pipeline file that an error of Spark is about."""
    try:
        yield
    except (PySparkException, PipelineInvalid) as cause:
        raise PartFailed(cause, path) from cause


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
    if raised := _RAISED.search(str(cause)):  # by `corrupt: fail`, by a rule, or by the SQL of the pipeline itself
        return wire.Failed(raised[1], raised[2].strip(), retriable=False, part=part)
    if refused := _refused(cause):
        return wire.Failed(wire.KAFKA_REFUSES, refused, retriable=True, part=part)
    # Spark quotes values of records in single quotes.
    text = "\n".join(re.sub(r"'.*'", "'...'", line) for line in lines[:_LINES])
    return wire.Failed(name, text, retriable=True, part=part)
