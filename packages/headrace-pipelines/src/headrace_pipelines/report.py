"""What is reported of a pipeline and its flows."""

from typing import Literal

import msgspec

State = Literal["starting", "running", "waiting", "failed", "finished", "paused", "stopped"]


class FlowMetrics(msgspec.Struct, kw_only=True, rename="camel"):
    """The metrics of a flow in its last micro-batch; counts may be sums since the supervising process began."""

    batch_id: int = -1
    """The last micro-batch that completed; -1 if none has."""
    input_records: int = 0
    """Records read from the sources, bad ones included; a topic that the flow reads twice counts once."""
    records_per_second: float = 0.0
    corrupt_records: int = 0
    """Records dropped because they did not match the schema of their source."""
    tombstone_records: int = 0
    """Records dropped because they had no value."""
    late_records: int = 0
    """Rows that went to the topic of late rows."""
    broken_rules: dict[str, int] = {}
    """Rule to the rows that broke it."""
    dropped_rows: int = 0
    """Rows before the watermark that Spark dropped; it may count several rows of one key once."""
    lag_records: int | None = None
    """Records in the sources that are still unread; None if that is not known."""
    received_per_second: float | None = None
    """Records that arrived per second since the micro-batch before."""
    batch_seconds: float | None = None
    """Duration of the micro-batch; None if there were no records."""
    state_rows: int | None = None
    """Rows kept between micro-batches; None without a stateful operator."""
    state_bytes: int | None = None
    watermark: str | None = None
    """Event time before which rows are late; None without a watermark."""


class FlowStatus(FlowMetrics, kw_only=True, rename="camel"):
    """One flow. Counts begin with this process; a micro-batch that was repeated after a crash counts twice."""

    state: State = "starting"
    group: str = ""
    """Consumer group that shows the progress of the flow; it has no members."""
    sink: str = ""
    """What the flow writes to: its kind and name, such as `topic orders`."""
    worked_seconds: float = 0.0
    """Sum of the durations of all micro-batches."""
    first_batch_seconds: float | None = None
    """Seconds since the flow began to run, until its driver reports a first micro-batch or an empty source;
    None afterwards."""
    last_error: str = ""


class PipelineStatus(msgspec.Struct, rename="camel"):
    """A whole run, for people."""

    name: str
    state: State
    reason: str
    """Why the run is not ready; empty if it is."""
    restarts: int
    driver_pid: int | None
    flows: dict[str, FlowStatus]
