"""What the driver process is told when it starts, and what it tells while it runs.

The plan comes as one JSON document on standard input, so nothing of it is in the process list. Events leave as one
JSON line each on what was standard output when the process began.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.config.section import Section
from headrace.pipelines.spec import PipelineSpec


class DriverPlan(Section):
    """Everything one driver process needs to run a pipeline."""

    spec: PipelineSpec
    """What to run."""
    bootstrap_servers: str
    """Kafka, as `host:port`, comma separated."""
    folder: Path
    """The pipeline's own folder: checkpoints, lock file, temporary files."""
    jars: tuple[Path, ...]
    """The Kafka connector."""

    def checkpoint(self, flow: str) -> Path:
        """Return the folder of a flow's checkpoint."""
        return self.folder / "checkpoints" / flow

    @property
    def scratch(self) -> Path:
        """Folder for what nobody needs once the process has ended."""
        return self.folder / "tmp"


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Something the driver tells."""


class SessionReady(Event, frozen=True, tag="session_ready"):
    """Spark is up; the flows are being started."""

    seconds: float
    """Since the process began."""


class FlowRunning(Event, frozen=True, tag="flow_running"):
    """A flow reads its sources now."""

    flow: str


class FlowProgress(Event, frozen=True, tag="flow_progress"):
    """A micro-batch has ended: its rows are in the sink and the checkpoint says so. Or none was needed for a while."""

    flow: str
    batch_id: int
    """The last micro-batch that ended; -1 if none has."""
    input_records: int
    """Records taken from the sources in this batch, bad ones included."""
    records_per_second: float
    corrupt_records: int
    """Of these, how many were no row of their source."""
    tombstone_records: int
    """Of these, how many had no value."""
    lag_records: int | None
    """Records in the sources that this batch left unread; None if that is not known."""
    positions: dict[str, dict[int, int]]
    """Topic to partition to the next offset to read."""


class FlowFinished(Event, frozen=True, tag="flow_finished"):
    """A flow has taken all there was, as its `once` trigger asks."""

    flow: str


class Failed(Event, frozen=True, tag="failed"):
    """The process is about to end with an error."""

    error: str
    """Spark's own name of the error, or the exception's."""
    text: str
    """The error's first lines, without values of records."""
    retriable: bool
    """Whether starting again may help; an error in SQL or schema stays."""
    part: str = ""
    """What failed, by its path in the pipeline file (`flows.delays_by_hour`); empty for the process as a whole."""


Tell = Callable[[Event], None]
"""Takes what the driver tells, in order."""
AnyEvent = SessionReady | FlowRunning | FlowProgress | FlowFinished | Failed
