"""Errors of Spark and of user code as events: their first lines, without values of records."""

import contextlib
import re
from collections.abc import Iterator
from typing import Self

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, ParseException, PySparkException

from headrace.errors import ConfigError, FunctionError, HeadraceError, PipelineInvalid, RecordRefused, RecordTooLarge
from headrace_pipelines import driver_protocol
from headrace_pipelines.checkpoints import CHOICES, RESTORE

_LINES = 4
_REPORT = re.compile(r"(?:Caused by: )?(?:\w+\.)+(\w+(?:Exception|Error): .*)")
_REPORT_LENGTH = 4000
_OWN = re.compile(r"^headrace\.errors\.(\w+): (.*)", re.MULTILINE)
_RAISED = re.compile(r"\[(USER_RAISED_EXCEPTION)\] (.*?)(?:SQLSTATE|\n|$)")
_LOSS_ADVICE = (
    "Kafka has removed records that the flow had not read: by retention, or with their topic. To skip them, set "
    "failOnDataLoss: false in the options of the source; to keep more next time, raise the topic's retention"
)
_DATA_ADVICE = "The same records would fail again: use try_cast, try_divide or a filter in SQL"
_PACKAGE_ADVICE = (
    "The executors' Python has no headrace: install the driver's version on every node, or name another Python by "
    "spark.pyspark.python in driver.settings"
)
_OWN_LASTING = (PipelineInvalid, ConfigError, FunctionError, RecordTooLarge, RecordRefused)
_RECORD_ADVICE = (
    "The same records would be rejected again: filter them out, or give them a key if the topic is compacted, or raise "
    "kafka.max.request.size in the options of the sink and max.message.bytes of the topic"
)
_MODE_ADVICE = "Spark cannot do this in any run: use trigger.interval_seconds, or change the flow"
_FORMAT_ADVICE = "Name a format that Spark can write a stream to, or add its package to spark.jars in driver.settings"
_LOST = re.compile(r"StatusCode\.UNAVAILABLE|\[INVALID_HANDLE\.SESSION_")
_DETAILS = re.compile(r'details = "(.*)"')
_OF_QUERY = re.compile(r"^\[STREAM_FAILED\] .*? terminated with exception: ")
_PYTHON = re.compile(
    r"FOREACH_BATCH_USER_FUNCTION_ERROR|api\.python\.PythonException|thrown from the Python worker|"
    r"Python worker exited unexpectedly"
)
_TRACEBACK = re.compile(r"Traceback .*\n(?:[ \t].*\n)*?((?:[ \t].*\n){1,3})([\w.]+)")
_LASTING = (
    (
        re.compile(r"(?:KAFKA_DATA_LOSS|Some data may have been lost)[\s\S]*?Reason:\s*(?P<text>.*)"),
        "RECORDS_REMOVED",
        _LOSS_ADVICE,
    ),
    (re.compile(r"STATE_STORE_\w+_(NOT_COMPATIBLE|INCOMPATIBLE)|NOT_MATCH_IN_STATE"), "CHECKPOINT_UNUSABLE", CHOICES),
    (
        re.compile(
            r"STREAMING_CHECKPOINT_\w+|STREAMING_STATEFUL_OPERATOR_MISSING|CONCURRENT_STREAM_LOG_UPDATE|"
            r"Checksum error: file:\S+/checkpoints/|Failed to read log file|batch \d+ doesn't exist"
        ),
        "CHECKPOINT_UNUSABLE",
        RESTORE,
    ),
    (re.compile(r"No module named .headrace"), "PACKAGE_MISSING", _PACKAGE_ADVICE),
    (re.compile(r"\[([A-Z_.]+)\][^\[]*SQLSTATE: 22"), "", _DATA_ADVICE),
    (re.compile(r"errors\.(RecordTooLarge|InvalidRecord)Exception: (?P<text>.*)"), "", _RECORD_ADVICE),
    (re.compile(r"\[(STREAMING_REAL_TIME_MODE[A-Z_.]*)\]"), "", _MODE_ADVICE),
    (re.compile(r"\[([A-Z_.]+)\] (?P<text>.*?) SQLSTATE: 42K02"), "", _FORMAT_ADVICE),
    (re.compile(r"(?P<text>Data source \S+ does not support streamed writing)"), "NOT_STREAMED", _FORMAT_ADVICE),
)
"""Permanent errors of a running flow, which a restart would only repeat: their pattern, name, and what to do."""
_MACHINE = (
    (
        re.compile(r"Python worker failed to connect back|waiting for the Python worker to connect back"),
        "Spark's Python worker did not start in time, because the machine is too busy. Try again with less other work",
    ),
    (re.compile(r"No space left on device"), "the disk is full: free space in the temporary folder and in state_dir"),
    (re.compile(r"OutOfMemoryError"), "the memory of Spark is full: give it more with driver.heap_bytes"),
)
"""What the machine lacks: its sign in an error of Spark, and what to do. A restart may help, an edit does not."""


class PartFailed(Exception):
    """A part of the pipeline failed; holds its event, made while the JVM still responds."""

    def __init__(self, cause: Exception, part: str) -> None:
        super().__init__(part)
        self.event = failure_event(cause, part)

    @classmethod
    def of(cls, event: driver_protocol.Failed) -> Self:
        """Return the failure of an event."""
        failure = cls(RuntimeError(event.text), event.part)
        failure.event = event
        return failure


@contextlib.contextmanager
def part(path: str) -> Iterator[None]:
    """Name the part of the pipeline file that an error of Spark is about. The whole driver has no name."""
    try:
        yield
    except (PySparkException, Py4JJavaError, HeadraceError) as cause:
        raise PartFailed(cause, path) from cause


def _traces(cause: BaseException) -> list[str]:
    """Return the traces of Java. The error of a query lacks the trace of its causes; the error of its cause has it."""
    found = [getattr(each, "_stackTrace", None) or "" for each in (cause, getattr(cause, "_cause", None))]
    return [*found, getattr(cause, "_stacktrace", None) or "", str(cause).partition("JVM stacktrace:")[2]]


def _refused(traces: list[str]) -> str:
    """Return what Java's exceptions report, in one line, if Kafka rejects this client; otherwise an empty text."""
    reports = [found[1] for trace in traces for line in trace.splitlines() if (found := _REPORT.match(line))]
    text = "; ".join(dict.fromkeys(reports))
    return text[found.start() :][:_REPORT_LENGTH] if (found := driver_protocol.REFUSED.search(text)) else ""


def failure_event(cause: Exception, part: str) -> driver_protocol.Failed:
    """Return the event of an error: its first lines, without values of records."""
    name = type(cause).__name__
    if isinstance(cause, PySparkException):
        with contextlib.suppress(Exception):  # boundary: without its JVM, the exception's class names it
            name = cause.getCondition() or name
    if isinstance(cause, HeadraceError):
        lasting = isinstance(cause, _OWN_LASTING)
        return driver_protocol.Failed(cause.message, cause.description, retriable=not lasting, part=part)
    if _LOST.search(str(cause)):
        details = next(iter(_DETAILS.findall(str(cause))), "it was started again")
        return driver_protocol.Failed(
            "SERVER_LOST", f"the Spark Connect server was lost: {details}", retriable=True, part=""
        )
    whole = _OF_QUERY.sub("", str(cause).partition("=== Streaming Query ===")[0])
    lines = [line for line in whole.splitlines() if line.strip() and not line.startswith("\tat ")]
    if isinstance(cause, AnalysisException):  # the query's plan comes after its first line, if it was parsed
        most = _LINES if isinstance(cause, ParseException) else 1
        return driver_protocol.Failed(name, "\n".join(lines[:most]), retriable=False, part=part)
    if own := _OWN.search(str(cause)):  # raised by the product's code in a Python worker of Spark
        return driver_protocol.Failed(
            own[1], own[2], retriable=own[1] not in {each.__name__ for each in _OWN_LASTING}, part=part
        )
    if raised := _RAISED.search(str(cause)):  # by `corrupt: fail`, by a rule, or by the SQL of the pipeline itself
        return driver_protocol.Failed(raised[1], raised[2].strip(), retriable=False, part=part)
    traces = _traces(cause)
    # Spark quotes values of records in single quotes.
    text = "\n".join(re.sub(r"'.*'", "'...'", line) for line in lines[:_LINES])
    for sign, sentence in _MACHINE:
        if sign.search("\n".join([whole, *traces])):
            return driver_protocol.Failed(driver_protocol.MACHINE_SHORT, sentence, retriable=True, part=part)
    for known, own_name, advice in _LASTING:
        if found := known.search("\n".join([whole, *traces])):
            text, flow = found.groupdict().get("text", text), part.removeprefix("flows.")
            return driver_protocol.Failed(
                own_name or found[1], f"{text}\n{advice.format(flow=flow)}", retriable=False, part=part
            )
    if refused := _refused(traces):
        return driver_protocol.Failed(driver_protocol.KAFKA_REFUSES, refused, retriable=True, part=part)
    if _PYTHON.search("\n".join([whole, *traces])):
        name = driver_protocol.PYTHON_FAILED
        if found := _TRACEBACK.search(whole):  # its last lines, without the error's text, which may have values
            text = f"{lines[0]}\n{found[1]}{found[2]}"
    return driver_protocol.Failed(name, text, retriable=True, part=part)
