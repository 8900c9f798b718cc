"""The sinks of a pipeline: Kafka topics, files, the console, and memory for tests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from headrace.config.internal_topics import external_topic
from headrace.config.section import Count, FormatName, Section, TopicName, known_by
from headrace.pipelines.sources import ColumnName, Options

OutputMode = Literal["append", "update", "complete"]


class _Sink(Section):
    mode: OutputMode = "append"
    """Spark's output mode."""

    @property
    def topics(self) -> list[str]:
        """Topics that it writes to."""
        return []


class KafkaSink(_Sink):
    """The topic a flow writes to: each row is one record, its value a JSON object of all columns."""

    topic: Annotated[TopicName, AfterValidator(external_topic)]
    """Topic to write; created like the first topic the flow reads if it does not exist."""
    key: Annotated[str, Field(min_length=1)] | None = None
    """SQL expression over the flow's columns; its value as text is the record's key. Without it keys are null."""
    value_format: FormatName | Literal["record"] = "json"
    """Format of the values. With `record` the columns `key`, `value` and `headers` are the record, as they are."""
    mode: OutputMode = "update"
    """Spark's output mode: `update` writes an aggregate's row whenever it changed, so the newest row per key counts;
    `append` writes it once, when a watermark has passed it; `complete` writes all rows every time."""
    options: Options = {}
    """Further options of Spark's Kafka connector, by its names; `kafka.` begins those of Kafka's client."""

    @property
    def topics(self) -> list[str]:
        return [self.topic]


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


class ConsoleSink(_Sink):
    """The log of the driver, for trials."""

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
    | Annotated[ConsoleSink, Tag("<console>")]
    | Annotated[MemorySink, Tag("<memory>")],
    Discriminator(known_by("topic", "files", "console", "memory")),
]
"""A sink; its kind is known by the key that only it has."""
