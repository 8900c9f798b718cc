"""What a sink declares: its keys, what it rejects and guarantees, and how the Spark driver writes with it.

One more sink is a file with a subclass of `Sink`, and its registration in `sink_kinds`. Headrace's own process and the
driver both import the file. So what needs Spark, a database or Kafka's client is imported inside `writer` and
`batches`, which run in the driver only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError
from headrace_pipelines.sources import EndSection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

NO_HANDLERS: Final = "real-time mode has neither handlers nor formats of the registry: use trigger.interval_seconds"
OutputMode = Literal["append", "update", "complete"]


class FlowFacts(NamedTuple):
    """What a sink is checked against."""

    by_handler: bool
    """Whether a handler makes the keys and values of its records."""
    realtime: bool
    """Whether Spark's real-time mode runs the flow."""


class FlowInDriver(NamedTuple):
    """What the driver gives a sink of the flow whose rows it writes."""

    name: str
    group: str
    """Consumer group of the flow: a name that no other flow has."""
    checkpoint: Path
    path: Callable[[str], str]
    """Makes a path of the pipeline file absolute."""
    connector: Mapping[str, str]
    """Options of Spark's Kafka connector: brokers, TLS and login."""
    kafka: KafkaConfig | None
    """How a client in the driver reaches Kafka; only there if `transaction_scope` is not empty."""
    secrets: Path
    """The file with the access to Kafka for Python workers, if `transaction_scope` is `task`."""
    tasks: int
    """`driver.shuffle_partitions`."""
    realtime: bool


class BatchWriter(Protocol):
    """Writes the micro-batches of one flow in the driver, for `foreachBatch`; in real-time mode, what counts them."""

    failure: HeadraceError | None
    """Why the last batch failed."""

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch."""

    def poll(self, completed: int) -> None:
        """Do what is due between batches, of which `completed` is the last; -1 before the first."""


class Sink(EndSection):
    """The target of a flow's rows. What is not overridden holds for a sink of rows that writes at least once."""

    references: ClassVar[tuple[str, ...]] = ()
    """Keys in whose sections references such as `${file:password}` are replaced. Secrets in them are read again from
    their file when a driver starts."""
    requires: ClassVar[tuple[str, str] | None] = None
    """The extra that it needs, and how the error for a missing one calls the sink."""

    mode: OutputMode = "append"
    """Spark's output mode."""

    @property
    def guarantee(self) -> str:
        """How often a row is in the sink after failures."""
        return "at least once"

    @property
    def in_driver(self) -> bool:
        """Whether each micro-batch is written by code in the driver. A Spark Connect server has no such code."""
        return False

    @property
    def transaction_scope(self) -> Literal["", "batch", "task"]:
        """The part of a micro-batch that is one transaction of Kafka; empty without any."""
        return ""

    @property
    def can_reject_rows(self) -> bool:
        """Whether a row may not fit, and needs a dead letter topic."""
        return False

    @property
    def expressions(self) -> dict[str, str]:
        """SQL expressions over the columns of the flow, by key."""
        return {}

    @property
    def only_writer(self) -> tuple[str, str] | None:
        """What no second flow may write to, and the reason with the remedy."""
        return None

    def problems(self, flow: FlowFacts) -> Iterator[str]:
        """Yield why it cannot take the rows of such a flow, with the remedy."""
        if flow.by_handler:
            yield "a handler makes keys and values itself: the sink needs a topic, without key and value_format"
        if flow.realtime:
            yield "real-time mode writes to Kafka only: give it a topic, or another trigger"
        if flow.realtime and flow.by_handler:
            yield NO_HANDLERS

    def frozen(self, tasks: int) -> str:
        """Return what its checkpoint freezes of it: after a change the checkpoint is rejected."""
        return self.described

    # In the driver

    def batches(self, flow: FlowInDriver) -> BatchWriter | None:
        """Return what writes each micro-batch in the driver; None if Spark writes."""
        return None

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return Spark's writer of the rows. A sink with topics gets records: `topic`, `key`, `value`, `headers`."""
        raise NotImplementedError


class TableSink(Sink):
    """A table that keeps the number of each micro-batch with its rows, so that it has each row once."""

    accept_unknown_batch: bool = False
    """Write a micro-batch although it is not known whether it was written before."""

    @property
    def guarantee(self) -> str:
        """The number of a micro-batch is committed with its rows."""
        return "exactly once"

    @property
    def in_driver(self) -> bool:
        """The table is written by code in the driver."""
        return True

    def target(self, flow: FlowInDriver, query: str) -> Any:
        """Return what `ExactlyOnceSink` writes the batches of a query to."""
        raise NotImplementedError

    def rows(self, batch: DataFrame) -> Any:
        """Return the rows of a micro-batch as an Arrow table."""
        return batch.toArrow()

    def batches(self, flow: FlowInDriver) -> BatchWriter | None:
        """Return what writes each micro-batch with its number."""
        from headrace_pipelines.driver.exactly_once_sink import ExactlyOnceSink

        return ExactlyOnceSink(
            flow.name,
            lambda query: self.target(flow, query),
            flow.checkpoint,
            accepts=self.accept_unknown_batch,
            read=lambda batch, number: self.rows(batch),
        )

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return a writer to the batches."""
        assert batches
        return rows.writeStream.foreachBatch(batches)
