"""The sink `topic`: a Kafka topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.section import FormatName, PositiveSeconds, TopicName
from headrace.config.topic_names import external_topic
from headrace_pipelines.sinks.changes import ChangeSink
from headrace_pipelines.sinks.sink import NO_HANDLERS, BatchWriter, FlowFacts, FlowInDriver, OutputMode
from headrace_pipelines.sources import Options, texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_TRANSACTION_SECONDS: Final = 60.0
_RESPONSE_MS: Final = 15_000
_RETRY_MS: Final = 2  # at first: a transaction begins while Kafka still completes the one before
_PRODUCER: Final = {
    "kafka.acks": "all",
    "kafka.enable.idempotence": "true",
    "kafka.linger.ms": "20",
    "kafka.batch.size": "262144",
    "kafka.compression.type": "lz4",
}


class KafkaSink(ChangeSink):
    """The topic a flow writes to: each row is one record, its value all columns in `value_format`.

    With `apply_as_deletes` a delete is a record without a value, which a compacted topic takes for one."""

    kind: ClassVar = "topic"
    keyed_by: ClassVar = "key"
    internal: ClassVar = frozenset(("transaction_timeout_seconds",))

    topic: Annotated[TopicName, AfterValidator(external_topic)]
    """Topic to write; created like the first topic the flow reads if it does not exist."""
    key: Annotated[str, Field(min_length=1)] | None = None
    """SQL expression over the flow's columns; its value as text is the record's key. Without it keys are null."""
    value_format: FormatName | Literal["record"] = "json"
    """Format of the values. With `record` the columns `key`, `value` and `headers` are the record, as they are."""
    schema_id: Annotated[int, Field(ge=1)] | None = None
    """Id of the schema of the values; of formats of the registry, without it, the newest of `<topic>-value`."""
    schema_file: Annotated[str, Field(min_length=1)] | None = None
    """File with that schema, relative to the pipeline file; it is registered when the flow starts."""
    mode: OutputMode = "update"
    """Spark's output mode: `update` writes an aggregate's row whenever it changed, so the newest row per key counts;
    `append` writes it once, when a watermark has passed it; `complete` writes all rows every time."""
    options: Options = {}
    """Further options of Spark's Kafka connector, by its names; `kafka.` begins those of Kafka's client."""
    delivery: Literal["at_least_once", "exactly_once"] = "at_least_once"
    """With `exactly_once` each micro-batch is one transaction of Kafka: readers at read_committed see all of its
    records at once, and none twice. The micro-batch must fit into the driver's memory (`trigger.max_records`). In
    real-time mode a transaction has the rows of some milliseconds of one partition."""
    scope: Literal["batch", "task"] = "batch"
    """With `exactly_once`: `task` writes a micro-batch in `driver.shuffle_partitions` transactions, each by a task of
    Spark, without the driver. The records of a task become visible at once, and those of a key are in one task."""
    transaction_timeout_seconds: PositiveSeconds = _TRANSACTION_SECONDS
    """With `exactly_once`: after this time Kafka aborts the transaction of a driver that is lost. The write of each
    micro-batch must be shorter. Until then readers at read_committed wait before its records."""
    accept_unknown_batch: bool = False
    """With `exactly_once`: write a micro-batch although Kafka no longer knows whether it was written before."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.delivery == "exactly_once" and self.options:
            raise ValueError("options are those of Spark's connector, which exactly_once does not use: remove them")
        own = self.accept_unknown_batch or self.transaction_timeout_seconds != _TRANSACTION_SECONDS
        if self.delivery != "exactly_once" and (own or self.scope == "task"):
            raise ValueError("scope and accept_unknown_batch need delivery: exactly_once: set it")
        return self

    @property
    def topics(self) -> list[str]:
        """The topic of its rows."""
        return [self.topic]

    @property
    def guarantee(self) -> str:
        """How often a row is in the topic."""
        by_task = ", each task visible on its own" if self.transaction_scope == "task" else ""
        return f"exactly once{by_task}" if self.transaction_scope else "at least once"

    @property
    def in_driver(self) -> bool:
        """Transactions are those of a client in the driver or its workers; the newest row is that of a micro-batch."""
        return self.delivery == "exactly_once" or bool(self.sequence_by)

    @property
    def transaction_scope(self) -> Literal["", "batch", "task"]:
        """Its `scope`, with `exactly_once`."""
        return self.scope if self.delivery == "exactly_once" else ""

    @property
    def can_reject_rows(self) -> bool:
        """A schema may not allow a row."""
        return self.value_format in SCHEMA_TYPES

    @property
    def expressions(self) -> dict[str, str]:
        """The expression of the records' key, and those of changes."""
        return {**({"key": self.key} if self.key else {}), **super().expressions}

    def problems(self, flow: FlowFacts) -> Iterator[str]:
        """Yield why it cannot take the rows of such a flow, with the remedy."""
        if flow.by_handler and (self.key or self.value_format != "json"):
            yield "a handler makes keys and values itself: the sink needs a topic, without key and value_format"
        if (self.schema_id or self.schema_file) and self.value_format not in SCHEMA_TYPES:
            yield f"schema_id and schema_file are for value_format {', '.join(SCHEMA_TYPES)}: correct it"
        yield from self.change_problems(flow)
        if self.change_settings and self.value_format == "record":
            yield f"value_format: record has its own keys and values: remove it, or {self.change_settings[0]}"
        if flow.realtime and self.mode != "update":
            yield "real-time mode supports mode: update only"
        if flow.realtime and self.scope == "task":
            yield "real-time mode has no micro-batch that tasks could split: remove scope"
        if flow.realtime and (flow.by_handler or self.value_format in SCHEMA_TYPES):
            yield NO_HANDLERS

    def frozen(self, tasks: int) -> str:
        """Return `topic`: another topic may have the next rows. Tasks may not change, as each has its number."""
        return f"topic in {tasks} transactions" if self.transaction_scope == "task" else "topic"

    def batches(self, flow: FlowInDriver) -> BatchWriter | None:
        """Return what writes each micro-batch in a transaction, or in one for each task, or its newest rows."""
        from headrace_pipelines.driver.newest_records import NewestWriter, newest_records

        if self.delivery != "exactly_once":
            return NewestWriter(self._producer_options(flow)) if self.sequence_by else None
        from headrace_pipelines.driver.exactly_once_sink import ExactlyOnceSink, query_of
        from headrace_pipelines.sinks.batch_transactions import BatchTransactions

        limit, accepts = self.transaction_timeout_seconds, self.accept_unknown_batch

        def make(query: str) -> Any:
            assert flow.kafka
            return BatchTransactions(flow.kafka, f"{flow.group}.{query}", limit)

        if flow.realtime:
            from headrace_pipelines.driver.row_transactions import RowTransactions

            clients = self._clients(flow.connector)
            return RowTransactions(make, flow.checkpoint, clients, flow.group, accepts=accepts)

        def in_driver(batch: DataFrame, number: int) -> Any:
            return (newest_records(batch) if self.sequence_by else batch).toArrow()

        if self.scope == "batch":
            return ExactlyOnceSink(flow.name, make, flow.checkpoint, accepts=accepts, expires=True, read=in_driver)
        from headrace_pipelines.driver.task_sink import TaskWriter

        def in_tasks(batch: DataFrame, number: int) -> Any:
            write = TaskWriter(f"{flow.group}.{query_of(batch)}", number, limit, flow.secrets, accepts)
            return write.all_of(newest_records(batch) if self.sequence_by else batch, flow.tasks)

        return ExactlyOnceSink(flow.name, make, flow.checkpoint, accepts=accepts, expires=True, read=in_tasks)

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return a writer to the batches or of rows with positions, or that of Spark's connector."""
        if batches and flow.realtime:
            from headrace_pipelines.driver.row_transactions import RowTransactions

            assert isinstance(batches, RowTransactions)
            return batches.writer(rows)
        if batches:
            return rows.writeStream.foreachBatch(batches)
        return rows.writeStream.format("kafka").options(**self._producer_options(flow))

    def _producer_options(self, flow: FlowInDriver) -> dict[str, str]:
        options = {**flow.connector, **_PRODUCER, **({"kafka.linger.ms": "0"} if flow.realtime else {})}
        return {**options, **texts(self.options)}

    def _clients(self, connector: Mapping[str, str]) -> dict[str, str]:
        """Return the properties of Kafka's clients in tasks of real-time mode."""
        limit = round(self.transaction_timeout_seconds * 1000)
        times = dict.fromkeys(("kafka.transaction.timeout.ms", "kafka.delivery.timeout.ms"), str(limit))
        times |= dict.fromkeys(("kafka.max.block.ms", "kafka.request.timeout.ms"), str(min(limit, _RESPONSE_MS)))
        own = {**_PRODUCER, "kafka.linger.ms": "0", "kafka.retry.backoff.ms": str(_RETRY_MS), **times}
        return {name.removeprefix("kafka."): value for name, value in {**connector, **own}.items()}
