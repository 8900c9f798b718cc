"""The sources of a pipeline: Kafka topics, files, a counter to try things out, and static tables."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from headrace.config.section import Count, FormatName, Section, TopicName, any_of

ColumnName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Columns = Annotated[str, Field(min_length=1)]
"""Columns and their types as in SQL's CREATE TABLE: `carrier STRING, arr_delay DOUBLE`."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`module:function`, in the folder of the pipeline file or installed."""
Options = dict[str, str | int | float | bool]


def texts(options: Options | dict[str, Any]) -> dict[str, str]:
    """Return options as Spark takes them: every value is a text, and true is `true`."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


CORRUPT_RECORDS, CORRUPT_FLOW = "_corrupt", "-corrupt"
"""Appended to a source's name: the view of its corrupt records, and the flow that writes them."""


CHANGE_COLUMNS: Final = ("__op", "__deleted", "__ts_ms", "__source_ts_ms", "__position")
"""Columns that `change: debezium` adds."""


class EndSection(Section):
    """A source or a sink: an end of a pipeline."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_alias=True, validate_by_name=True)

    kind: ClassVar[str]
    """The key by which its kind is known."""
    named_by: ClassVar[str] = ""
    """The key whose value names it, if that is another key than `kind`."""

    @property
    def topics(self) -> list[str]:
        """Topics that it reads or writes."""
        return []

    @property
    def described(self) -> str:
        """What it reads or writes: the key that names it, and its value."""
        key = self.named_by or self.kind
        return f"{key} {getattr(self, key)}"

    @property
    def title(self) -> str:
        """The same for people: a key that is only switched on stands alone."""
        key = self.named_by or self.kind
        return key if getattr(self, key) is True else self.described


class KafkaSource(EndSection):
    """One Kafka topic as a table of rows that never ends.

    A value that is not of its format, or in which a field is not of its declared type, is corrupt.
    A field that is absent is null; fields that the schema does not name are ignored. The corrupt records of a source
    are also a view: `<source>_corrupt`.
    """

    kind: ClassVar = "topic"

    topic: TopicName
    """Topic to read; records of aborted transactions are not seen."""
    value_format: FormatName = "json"
    """Format of the values."""
    value_schema: Annotated[Columns | None, Field(alias="schema")] = None
    """Columns and their types as in SQL's CREATE TABLE: `carrier STRING, arr_delay DOUBLE`. JSON needs them. Formats
    of the schema registry take them from the newest schema of `<topic>-value`; `string` and `binary` have `value`."""
    change: Literal["debezium"] | None = None
    """With `debezium` the values are change events of Debezium, and `schema` has the columns of the changed table. The
    further columns `__op`, `__deleted`, `__ts_ms`, `__source_ts_ms` and `__position` describe the change. `json`, and
    formats of the schema registry."""
    key_column: ColumnName | None = None
    """Name of a further column that holds the record's key as text."""
    timestamp_column: ColumnName | None = None
    """Name of a further column that holds the record's timestamp."""
    starting: Literal["earliest", "latest"] = "earliest"
    """The start of a flow that has no checkpoint yet."""
    corrupt: Literal["drop", "fail", "quarantine"] = "drop"
    """What happens to corrupt records: they are counted in any case. `quarantine` writes them to the dead letter
    topic as they are; `fail` stops the flows."""
    dead_letter_topic: TopicName | None = None
    """Dead letter topic of corrupt records; `<topic>.dlq` when absent."""
    options: Options = {}
    """Further options of Spark's Kafka connector, by its names; `kafka.` begins those of Kafka's client."""

    @property
    def topics(self) -> list[str]:
        """The topic that it reads."""
        return [self.topic]

    @property
    def dead_letters(self) -> str:
        """The dead letter topic of corrupt records."""
        return self.dead_letter_topic or f"{self.topic}.dlq"


class FileSource(EndSection):
    """Files of a folder as a table that grows: each new file is read once."""

    kind: ClassVar = "files"

    files: Annotated[str, Field(min_length=1)]
    """Folder or pattern, such as `/data/trips/*.parquet`; relative to the pipeline file."""
    format: Literal["parquet", "json", "csv", "text"] = "parquet"
    """Format of the files."""
    value_schema: Annotated[Columns, Field(alias="schema")]
    """Columns and their types as in SQL's CREATE TABLE."""
    options: Options = {}
    """Further options of Spark's reader of this format, such as `header`."""


class RateSource(EndSection):
    """Rows made by Spark, to try things out: columns `timestamp` and `value`, which counts from 0."""

    kind: ClassVar = "rate"

    rate: Count
    """Rows per second."""


class TableSource(EndSection):
    """A table that does not grow, for joins. Each micro-batch reads its present rows."""

    kind: ClassVar = "table"

    table: Annotated[str, Field(min_length=1)]
    """File or folder, relative to the pipeline file; for `jdbc` the table's name."""
    format: Literal["parquet", "json", "csv", "jdbc"] = "csv"
    """Format of the files, or `jdbc`, whose driver must be among the jars."""
    value_schema: Annotated[Columns | None, Field(alias="schema")] = None
    """Columns and their types as in SQL's CREATE TABLE. Parquet and JDBC have their own."""
    options: Options = {}
    """Further options of Spark's reader of this format, such as `header` or `url`."""


SOURCES: Final[dict[str, type[EndSection]]] = {
    kind.kind: kind for kind in (KafkaSource, FileSource, RateSource, TableSource)
}
"""Each kind of source by the key that only it has."""

if TYPE_CHECKING:
    AnySource = KafkaSource | FileSource | RateSource | TableSource
else:
    AnySource = any_of(SOURCES)
