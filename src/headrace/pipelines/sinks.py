"""The sinks of a pipeline: Kafka topics, files, the console, and memory for tests."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, SecretStr, Tag, model_validator

from headrace.config.backend import RowsBackend
from headrace.config.consumers import ReactiveConsumerConfig, RowsConfig
from headrace.config.section import Count, FormatName, Port, PositiveSeconds, Section, TopicName, known_by
from headrace.config.topic_names import external_topic
from headrace.pipelines.sources import ColumnName, EndSection, Options

_TRANSACTION_SECONDS: Final = 60.0
OutputMode = Literal["append", "update", "complete"]


class PushConfig(RowsConfig):
    """How the records of a sink are pushed: from the start of its topic, with keys as text."""

    internal: ClassVar = RowsConfig.internal | {"auto_offset_reset"}


class _Sink(EndSection):
    mode: OutputMode = "append"
    """Spark's output mode."""


class KafkaSink(_Sink):
    """The topic a flow writes to: each row is one record, its value all columns in `value_format`."""

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
    records at once, and none twice. The micro-batch must fit into the driver's memory (`trigger.max_records`)."""
    scope: Literal["batch", "task"] = "batch"
    """With `exactly_once`: `task` writes a micro-batch in `driver.shuffle_partitions` transactions, each by a task of
    Spark, without the driver. The records of a task become visible at once, and those of a key are in one task."""
    transaction_timeout_seconds: PositiveSeconds = _TRANSACTION_SECONDS
    """With `exactly_once`: after this time Kafka aborts the transaction of a driver that is lost. The write of each
    micro-batch must be shorter. Until then readers at read_committed wait before its records."""
    accept_unknown_batch: bool = False
    """With `exactly_once`: write a micro-batch although Kafka no longer knows whether it was written before."""

    backend: RowsBackend | None = None
    """HTTP server that the records of the topic are pushed to, by a reactive consumer of this process."""
    push: PushConfig = PushConfig()
    """With `backend`: how they are pushed."""

    def consumer(self, group: str) -> ReactiveConsumerConfig | None:
        """Return the reactive consumer that pushes the records; None if there is no backend."""
        if self.backend is None:
            return None
        chosen = {name: getattr(self.push, name) for name in self.push.model_fields_set}
        value_format = "json" if self.value_format == "record" else self.value_format
        return ReactiveConsumerConfig(
            topics=[self.topic], group=group, backend=self.backend, value_format=value_format, **chosen
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.consumer("check")
        if self.backend is None and self.push != PushConfig():
            raise ValueError("push needs a backend: write backend: {url: ...}, or remove push")
        if self.delivery == "exactly_once" and self.options:
            raise ValueError("options are those of Spark's connector, which exactly_once does not use: remove them")
        own = self.accept_unknown_batch or self.transaction_timeout_seconds != _TRANSACTION_SECONDS
        if self.delivery != "exactly_once" and (own or self.scope == "task"):
            raise ValueError("scope and accept_unknown_batch need delivery: exactly_once: set it")
        return self


class FileSink(_Sink):
    """Files in a folder. Readers that honour Spark's log of the folder see each row once."""

    files: Annotated[str, Field(min_length=1)]
    """Folder, relative to the pipeline file."""
    format: Literal["parquet", "json", "csv", "text"] = "parquet"
    """Format of the files."""
    partition_by: list[ColumnName] = []
    """Columns that become folders."""
    mode: Literal["append"] = "append"
    """Spark's output mode: files are written once."""
    options: Options = {}
    """Further options of Spark's writer of this format."""


class PostgresConnection(Section):
    """How to reach a database of PostgreSQL. References work here, such as `${file:password}`."""

    host: Annotated[str, Field(min_length=1)] = "localhost"
    """Name or address of the server."""
    port: Port = 5432
    """Its port."""
    database: Annotated[str, Field(min_length=1)]
    """Name of the database."""
    user: Annotated[str, Field(min_length=1)]
    """User, who needs SELECT, INSERT and UPDATE on the table, and may create tables or has `_headrace_batches`."""
    password: SecretStr = SecretStr("")
    """Password of the user. From a file it is read again when the driver starts."""
    options: dict[str, str] = {}
    """Further parameters of libpq, such as `sslmode: verify-full` and `sslrootcert`."""


class PostgresSink(_Sink):
    """A table of PostgreSQL. Each micro-batch is one transaction, and its number is committed with it: exactly once.

    Nested columns are written as JSON, and timestamps in UTC."""

    postgres: PostgresConnection
    """The database."""
    table: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")]
    """Table that has all columns of the flow, with its schema where that is needed: `public.totals`."""
    keys: list[ColumnName] = []
    """Columns of a unique key: a row replaces the row with the same key. Without keys every row is added."""
    mode: OutputMode = "update"
    """Spark's output mode: with `update` an aggregate's row is written whenever it changed."""
    accept_unknown_batch: bool = False
    """Write a micro-batch although it is not known whether it was written before."""


class ConsoleSink(_Sink):
    """The log of the driver, for trying things out: 20 rows of each micro-batch."""

    internal: ClassVar = frozenset(("rows",))

    console: Literal[True]
    """Write the rows of each micro-batch to the driver's log."""
    rows: Count = 20
    """Rows of a micro-batch that are written."""


class MemorySink(_Sink):
    """A table in the driver's memory, for tests."""

    memory: Literal[True]
    """Keep the rows in a table that has the flow's name."""


AnySink = Annotated[
    Annotated[KafkaSink, Tag("<topic>")]
    | Annotated[FileSink, Tag("<files>")]
    | Annotated[PostgresSink, Tag("<postgres>")]
    | Annotated[ConsoleSink, Tag("<console>")]
    | Annotated[MemorySink, Tag("<memory>")],
    Discriminator(known_by("topic", "files", "postgres", "console", "memory")),
]
"""A sink; its kind is known by the key that only it has."""
