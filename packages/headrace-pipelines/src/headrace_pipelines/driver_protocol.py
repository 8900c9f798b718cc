"""The requests that the driver process gets, and the events that it sends.

A request is a plan with a task: one JSON line on standard input, so nothing of it is in the process list. Each event is
one JSON line on the standard output that the process started with. With another task than `run`, a driver keeps its
Spark session and waits for the next request, until standard input ends.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config.kafka import KafkaConfig
from headrace.config.section import Section
from headrace_pipelines.report import FlowMetrics
from headrace_pipelines.secrets_file import SECRETS_FILE, with_secrets
from headrace_pipelines.spark_project import SparkProject
from headrace_pipelines.spec import PipelineSpec

Rows = list[dict[str, Any]]
"""Rows as JSON has them: column to value."""


class DriverTask(Section):
    """The work of one request. Only `run` writes to sinks and checkpoints."""

    kind: Literal["run", "describe", "show", "test", "state"] = "run"
    """`run` runs the flows, and no request follows it. `describe` resolves columns and state. `show`
    returns rows from a slice of the topics, `test` rows from given rows of the sources, `state` the rows
    that a checkpoint keeps."""
    name: str = ""
    """The source, view or flow to show."""
    checkpoint: Path = Path()
    """The checkpoint whose state is shown."""
    limit: int = 10
    """Rows to show at most."""
    slices: dict[str, dict[int, tuple[int, int]]] = {}
    """Topic to partition to the first offset to show and the one after the last."""
    given: dict[str, list[Rows]] = {}
    """Source to the rows of each step of a test case; a source that is not named has no rows."""
    expect: dict[str, Rows | None] = {}
    """Flow or view to its expected rows; None only returns the rows that it has."""
    streaming: bool = False
    """Whether each step is a separate micro-batch; otherwise all steps are one table."""
    step_seconds: float = 1.0
    """With `streaming`: time from one step to the next, for the timers of processors."""


class DriverPlan(Section):
    """Everything one driver process needs for a task with a pipeline."""

    spec: PipelineSpec | SparkProject
    """The pipeline to run."""
    bootstrap_servers: str
    """Kafka, as `host:port`, comma separated."""
    security: dict[str, str] = {}
    """The connector's options of TLS and login; secrets are references to a file in the folder."""
    kafka: KafkaConfig | None = None
    """How the driver's own client reaches Kafka, for sinks that need it."""
    folder: Path
    """The pipeline's own folder: checkpoints, lock file, temporary files."""
    jars: tuple[Path, ...]
    """The Kafka connector."""
    java_flags: tuple[str, ...] = ()
    """Further flags of the JVM, such as those of its class-data archive."""
    topic_ids: dict[str, str] = {}
    """Id of each topic that is read, as it was when the driver started."""
    task: DriverTask = DriverTask()
    """The work to do."""

    def document(self) -> bytes:
        """Return the plan with its secrets, as JSON. It is for standard input of the driver only."""
        return with_secrets(self).encode()

    def checkpoint(self, flow: str) -> Path:
        """Return the folder of a flow's checkpoint."""
        return self.folder / "checkpoints" / flow

    def path(self, text: str) -> str:
        """Return a path of the pipeline file, which may be relative to its folder, or a URL."""
        return text if "://" in text else str((self.spec.folder or Path()) / text)

    @property
    def secrets(self) -> Path:
        """The file that only its owner can read; it is not in Spark's plans."""
        return self.folder / SECRETS_FILE

    @property
    def scratch(self) -> Path:
        """Folder of temporary files of one process."""
        return self.folder / "tmp"


class DriverEvent(msgspec.Struct, frozen=True, tag_field="event"):
    """An event of the driver."""


class FolderInUse(DriverEvent, frozen=True, tag="folder_in_use"):
    """Another process uses the pipeline's folder; this one waits for its end."""

    owner: str


class SessionReady(DriverEvent, frozen=True, tag="session_ready"):
    """Spark is up; the flows are being started."""

    seconds: float
    """Since the process began."""


class FlowRunning(DriverEvent, frozen=True, tag="flow_running"):
    """A flow reads its sources now."""

    flow: str


class FlowProgress(DriverEvent, FlowMetrics, frozen=True, kw_only=True, tag="flow_progress"):  # type: ignore[misc]
    """A micro-batch has completed: sink and checkpoint have its rows. Or no records arrived for a while."""

    flow: str
    began: str = ""
    """When it began, by ISO 8601."""
    positions: dict[str, dict[int, int]]
    """Topic to partition to the next offset to read."""


class FlowWorking(DriverEvent, frozen=True, tag="flow_working"):
    """Tasks of a long micro-batch have completed."""

    flow: str


class FlowFinished(DriverEvent, frozen=True, tag="flow_finished"):
    """A flow with the trigger `once` has read all records."""

    flow: str


class FlowFailed(DriverEvent, frozen=True, tag="flow_failed"):
    """A flow has failed, and the others continue."""

    flow: str
    error: str
    text: str


class TaskResult(DriverEvent, frozen=True, tag="answered"):
    """A task other than `run` is done."""

    result: Any
    """What it returns, as JSON has it."""


class Failed(DriverEvent, frozen=True, tag="failed"):
    """The task failed. A process with the task `run` is about to end."""

    error: str
    """Spark's own name of the error, or the exception's."""
    text: str
    """The error's first lines, without values of records."""
    retriable: bool
    """Whether a restart may help; an error in SQL or schema is permanent."""
    part: str = ""
    """The failed part, by its path in the pipeline file (`flows.delays_by_hour`); empty for the process as a whole."""
    stack: str = ""
    """The whole error, for a task other than `run`."""


KAFKA_REFUSES = "KAFKA_REFUSES"
"""Name of an error: Kafka rejected TLS, the login, or a right; the text is what Java's exceptions report."""
PYTHON_FAILED = "PYTHON_FAILED"
"""Name of an error: Python code of the pipeline raised it, or ended its process."""
MACHINE_SHORT = "MACHINE_SHORT"
"""Name of an error: the machine is too busy, or lacks memory or disk; the pipeline file is not the cause."""
REFUSED = re.compile(
    r"((Sasl|Ssl)Authentication|UnsupportedSaslMechanism|(Topic|Group|Cluster)Authorization|Login)Exception"
)
"""The exceptions of Kafka's client for `KAFKA_REFUSES`."""
MOST_RESPONSE_BYTES = 64_000_000
"""Size of the largest result, as JSON."""
SendEvent = Callable[[DriverEvent], None]
"""Sends an event, in order."""
AnyEvent = (
    FolderInUse
    | SessionReady
    | FlowRunning
    | FlowProgress
    | FlowWorking
    | FlowFinished
    | FlowFailed
    | TaskResult
    | Failed
)
