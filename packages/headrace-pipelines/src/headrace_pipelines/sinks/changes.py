"""Changes in sequence: which row of a key is the newest, which rows are deletes, and which columns are written.

The words are those of Spark's declarative pipelines: `keys`, `sequence_by`, `apply_as_deletes`. As there, a null key
and a null sequence stop the flow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from pydantic import Field

from headrace.errors import PipelineInvalid
from headrace_pipelines.sinks.sink import FlowFacts, Sink

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

SEQUENCE: Final = "__headrace_sequence"
"""Column with the sequence of a row as a text; texts have the order of the values."""
DELETED: Final = "__headrace_deleted"
"""Column that is true for a row that deletes, otherwise false."""
HIDDEN: Final = "__"
"""Columns whose names begin with it are not written by a sink that applies changes."""
_POSITION, _RANK = "__headrace_position", "__headrace_rank"
_MOST_DECIMALS: Final = 6
"""Spark may write a decimal with more of them in scientific notation."""
_NEGATIVE, _DIGITS, _INVERTED = "0", "0123456789", "9876543210"


class ChangeSink(Sink):
    """A sink that can apply changes: of the rows with one key the newest counts, and some rows delete."""

    keyed_by: ClassVar[str] = "keys"
    """The key of the section that says which rows belong together."""

    sequence_by: Annotated[str, Field(min_length=1)] | None = None
    """SQL expression over the flow's columns. Of the rows with one key that with the largest value is the newest; of
    equal values the later row. Columns whose names begin with `__` are then not written."""
    apply_as_deletes: Annotated[str, Field(min_length=1)] | None = None
    """SQL condition over the flow's columns: a row for which it is true deletes the row with its key. Columns whose
    names begin with `__` are then not written."""

    @property
    def change_settings(self) -> list[str]:
        """Its settings about changes that are set."""
        return [name for name in ("sequence_by", "apply_as_deletes") if getattr(self, name)]

    @property
    def expressions(self) -> dict[str, str]:
        """SQL expressions over the columns of the flow, by key."""
        return {name: getattr(self, name) for name in self.change_settings}

    def problems(self, flow: FlowFacts) -> Iterator[str]:
        """Yield why it cannot take the rows of such a flow, with the remedy."""
        yield from super().problems(flow)
        yield from self.change_problems(flow)

    def change_problems(self, flow: FlowFacts) -> Iterator[str]:
        """Yield why it cannot apply changes of such a flow, with the remedy."""
        settings = self.change_settings
        if settings and flow.by_handler:
            yield f"a handler makes records itself, so {settings[0]} has no columns: remove it"
        elif settings and not getattr(self, self.keyed_by):
            yield f"{settings[0]} needs {self.keyed_by}, which says what a row replaces or deletes: add it"
        hidden = [name for name in getattr(self, "keys", ()) if settings and name.startswith(HIDDEN)]
        if hidden:
            yield f"keys names {hidden[0]}, and columns whose names begin with {HIDDEN} are not written: rename it"
        if settings and self.mode == "complete":
            yield f"mode: complete writes all rows every time, without {settings[0]}: remove one of them"
        if self.sequence_by and flow.realtime:
            yield "real-time mode writes each row at once, so none is the newest: remove sequence_by"

    def written(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that are written."""
        return [name for name in columns if not (self.change_settings and name.startswith(HIDDEN))]


def with_changes(rows: DataFrame, sink: ChangeSink, keys: Sequence[Column]) -> DataFrame:
    """Return the rows with `SEQUENCE` and `DELETED`. A row with a null key or sequence stops the flow.

    Without `sequence_by` all rows have an equal sequence.

    Raises:
        PipelineInvalid: The type of `sequence_by` has no order that is kept.
    """
    return rows.withColumns({SEQUENCE: sequence_of(rows, sink, keys), DELETED: is_delete(sink)})


def is_delete(sink: ChangeSink) -> Column:
    """Return whether a row deletes; a null condition does not."""
    from pyspark.sql import functions as f

    condition = f.expr(sink.apply_as_deletes).cast("boolean") if sink.apply_as_deletes else f.lit(False)
    return f.coalesce(condition, f.lit(False))


def sequence_of(rows: DataFrame, sink: ChangeSink, keys: Sequence[Column]) -> Column:
    """Return the sequence of a row as a text; raises as `with_changes` does."""
    from pyspark.sql import functions as f

    value = f.expr(sink.sequence_by or "0")
    kind = rows.select(value.alias(SEQUENCE)).schema[SEQUENCE].dataType
    text = ordered_text(value, kind)
    if text is None:
        what = f"sink.sequence_by is {kind.simpleString()}, whose order is not kept"
        raise PipelineInvalid(f"{what}: cast it to BIGINT, STRING or DECIMAL with at most {_MOST_DECIMALS} decimals")
    null_key = functools.reduce(lambda left, right: left | right, (key.isNull() for key in keys), f.lit(False))
    key_text, sequence_text = (
        f"a row has a null in {name} of the sink: filter it out in the flow's SQL"
        for name in (sink.keyed_by, "sequence_by")
    )
    checked = f.when(null_key, f.raise_error(f.lit(key_text))).when(value.isNull(), f.raise_error(f.lit(sequence_text)))
    return checked.otherwise(text).cast("string")


def newest(batch: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the newest row of each key of a micro-batch, and all rows without a sequence.

    Of rows with equal sequences the later one in the batch is newer. If the flow has no aggregate or join, that is
    Kafka's order within a partition.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy(*keys).orderBy(f.col(SEQUENCE).desc(), f.col(_POSITION).desc())
    ranked = batch.withColumn(_POSITION, f.monotonically_increasing_id()).withColumn(_RANK, f.row_number().over(order))
    return ranked.where(f.col(SEQUENCE).isNull() | (f.col(_RANK) == 1)).drop(_POSITION, _RANK)


def ordered_text(value: Column, kind: DataType) -> Column | None:
    """Return a value as a text so that texts, compared by their bytes, have Spark's order of the values.

    None for a type without such a text. A null is before all other values.
    """
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    text: Column | None = None
    if isinstance(kind, t.BooleanType | t.ByteType | t.ShortType | t.IntegerType | t.LongType):
        text = _whole(value)
    elif isinstance(kind, t.DateType):
        text = _whole(f.unix_date(value))
    elif isinstance(kind, t.TimestampType):
        text = _whole(f.unix_micros(value))
    elif isinstance(kind, t.TimestampNTZType):
        text = value.cast("string")
    elif isinstance(kind, t.StringType | t.BinaryType):
        text = f.hex(value.cast("binary"))
    elif isinstance(kind, t.DecimalType) and kind.scale <= _MOST_DECIMALS:
        digits = f.lpad(f.abs(value).cast("string"), kind.precision + 2, "0")
        negative = f.concat(f.lit(_NEGATIVE), f.translate(digits, _DIGITS, _INVERTED))
        text = f.when(value < 0, negative).otherwise(f.concat(f.lit("1"), digits))
    elif isinstance(kind, t.StructType):
        fields = [ordered_text(value.getField(field.name), field.dataType) for field in kind.fields]
        if all(field is not None for field in fields):
            text = f.concat_ws(" ", *(field for field in fields if field is not None))
    return None if text is None else f.when(value.isNull(), f.lit("0")).otherwise(f.concat(f.lit("1"), text))


def _whole(value: Column) -> Column:
    from pyspark.sql import functions as f

    return f.lpad(f.hex(value.cast("bigint").bitwiseXOR(f.lit(-(1 << 63)))), 16, "0")
