"""Formats of values in Spark: a value becomes JSON text, which is read as a row; a row becomes a value.

Each value names its schema by id, so a micro-batch may have several schemas, and a new one needs no restart. Spark's
Python workers import this module, and get schemas from the registry themselves.
"""

import asyncio
import functools
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.kafka import SchemaRegistryConfig
from headrace.delivery.dead_letter import PREFIX, headers_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.errors import EncodeError, FormatError, FunctionError, PipelineInvalid
from headrace.formats.plain import header_of, unframe
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.formats.schema_codec import compile_schema
from headrace.formats.sql_types import sql_columns
from headrace.functions import protocol
from headrace.functions.sdk import print_line
from headrace.records import Header, Record
from headrace.runtime import SystemClock
from headrace_pipelines.driver.kafka_rows import FAILED
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.secrets_file import REGISTRY, secret
from headrace_pipelines.sinks.topic_sink import KafkaSink

T = TypeVar("T")
Row = tuple[str | None, bytes | None, bytes | None, Sequence[Header] | None, bool]
"""Topic, key, value and headers of a record to write, and whether it failed. One that is dropped has no topic."""
RECORD = "topic STRING, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, failed BOOLEAN"
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_KINDS = {"topic": pa.string(), "key": pa.binary(), "value": pa.binary(), "headers": HEADERS, "failed": pa.bool_()}
_ORIGIN = frozenset(f"{PREFIX}{name}" for name in ("topic", "partition", "offset", "timestamp"))


class BlockingRegistry:
    """The schema registry and compiled schemas, for code without an event loop."""

    def __init__(self, secrets: Path) -> None:
        """Take its address and login from the secrets file."""
        settings = SchemaRegistryConfig.model_validate_json(secret(secrets, REGISTRY))
        self.client = SchemaRegistry(settings, SystemClock())
        self._loop = asyncio.new_event_loop()
        self._codecs: dict[int, Any] = {}

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call of the client."""
        return self._loop.run_until_complete(call)

    def schema(self, found: RegisteredSchema) -> protocol.Schema:
        """Return a schema with the texts that it refers to."""
        return protocol.Schema(found.id, found.type, found.text, self.wait_for(self.client.texts_of(found.references)))

    def codec(self, schema_id: int) -> Any:
        """Return the codec of a schema.

        Raises:
            FormatError: The registry does not have it, or it is not usable.
            RegistryUnavailable: The registry is needed and does not respond.
        """
        if (codec := self._codecs.get(schema_id)) is None:
            found = self.schema(self.wait_for(self.client.by_id(schema_id)))
            codec = self._codecs[schema_id] = compile_schema(found.schema_type, found.text, found.references)
        return codec

    def decode(self, framed: bytes) -> bytes:
        """Return a value as JSON text; raises as `codec` does."""
        schema_id, payload = unframe(framed)
        text: bytes = self.codec(schema_id).decode_row(payload)
        return text


registry_of = functools.cache(BlockingRegistry)


class FailurePolicy(NamedTuple):
    """What happens to a record that a handler fails for, or to a row that does not fit its schema."""

    group: str
    """Group that shows the flow's progress; its name is in dead letters."""
    topic: str
    """Of dead letters."""
    on_error: Literal["dead_letter", "drop", "fail"]

    def row(self, record: Record, reply: Reply, attempts: int, began: float, *, has_origin: bool = False) -> Row:
        """Return the dead letter of a record; without an origin it cannot be redriven.

        Raises:
            FunctionError: The policy is `fail`.
        """
        if self.on_error == "fail":
            what = f"{record.topic}-{record.partition}-{record.offset}" if has_origin else "a row"
            print_line("error", f"{what} failed: {reply.stack or reply.reason}", {})  # in driver.err only
            raise FunctionError(f"{what} failed with {reply.error} after {attempts} attempts, and on_error is fail")
        if self.on_error == "drop":
            return None, None, None, None, True
        headers = headers_of(DeadLetter(record, self.group, attempts, reply, began, time.time()))
        if not has_origin:
            headers = [header for header in headers if header[0] not in _ORIGIN]
        return self.topic, record.key, record.value, headers, True


def columns_of(value_format: str, topic: str, secrets: Path) -> str:
    """Return the columns of a topic: those of the newest schema of its values.

    Raises:
        PipelineInvalid: The schema does not exist, or has no columns.
    """
    registry = registry_of(secrets)
    try:
        found = registry.schema(
            _of_format(registry.wait_for(registry.client.of_subject(f"{topic}-value")), value_format)
        )
        return sql_columns(found.schema_type, found.text, found.references)
    except FormatError as cause:
        raise PipelineInvalid(f"{cause}. Or write the columns: schema: name TYPE, name TYPE") from cause


def decoded(records: DataFrame, secrets: Path) -> DataFrame:
    """Return records with two more columns: `text` is the value as JSON, `problem` the reason if there is none."""
    schema = StructType([*records.schema.fields]).add("text", "string").add("problem", "string")
    return records.mapInArrow(functools.partial(_decode, secrets), schema)


def _decode(secrets: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    registry = registry_of(secrets)
    for batch in batches:
        found: list[tuple[bytes | None, str | None]] = []
        for data in batch.column("value").to_pylist():
            try:
                found.append((None if data is None else registry.decode(data), None))
            except FormatError as cause:
                found.append((None, cause.description))
        texts, problems = zip(*found, strict=True)
        added = pa.array(texts, pa.string()), pa.array(problems, pa.string())
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], [*batch.schema.names, "text", "problem"])


def encoded(records: DataFrame, plan: DriverPlan, name: str) -> DataFrame:
    """Return the records of a flow, with values made from their column `row` if it is not null.

    Raises:
        PipelineInvalid: The registry does not have the schema or rejects it, or it is of another format.
    """
    flow = plan.spec.flows[name]
    sink = flow.sink
    subject = f"{sink.topics[0]}-value"
    registry = registry_of(plan.secrets)
    assert isinstance(sink, KafkaSink)
    try:
        if sink.schema_file:
            text = Path(plan.path(sink.schema_file)).read_text("utf-8")
            call = registry.client.register(subject, text, SCHEMA_TYPES[sink.value_format])
        else:
            call = registry.client.by_id(sink.schema_id) if sink.schema_id else registry.client.of_subject(subject)
        schema_id = _of_format(registry.wait_for(call), sink.value_format).id
        registry.codec(schema_id).require_writable()
    except (FormatError, OSError) as cause:
        raise PipelineInvalid(f"{cause}. Register the schema, or name it: schema_id or schema_file") from cause
    failures = FailurePolicy(plan.spec.group(name), flow.dead_letters or "", flow.on_error)
    return counted(records.mapInArrow(functools.partial(encode, schema_id, failures, plan.secrets), RECORD))


def counted(records: DataFrame) -> DataFrame:
    """Return the records to write, with the columns of `RECORD`, and count those that failed."""
    return records.observe(FAILED, f.count_if("failed").alias("failed")).where("topic IS NOT NULL").drop("failed")


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return records to write as an Arrow batch."""
    columns = zip(*rows, strict=True) if rows else [()] * len(_KINDS)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, _KINDS.values(), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [*_KINDS])


def encode(
    schema_id: int, failures: FailurePolicy, secrets: Path, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Make values from rows; the function of `mapInArrow`."""
    header, codec = header_of(schema_id), registry_of(secrets).codec(schema_id)
    framed = getattr(codec, "encode_python", None) or (lambda text: codec.encode(text.encode()))
    names = "topic", "key", "value", "headers", "row"
    for batch in batches:
        rows: list[Row] = []
        columns = (_values(batch.column(name)) for name in names)
        for topic, key, value, headers, row in zip(*columns, strict=True):
            try:
                if isinstance(row, EncodeError):
                    raise row
                rows.append((topic, key, value if row is None else header + framed(row), headers, False))
            except EncodeError as cause:
                record, reply = Record(topic, 0, 0, -1, key, value), Reply("EncodeError", cause.description)
                rows.append(failures.row(record, reply, 1, time.time()))
        yield batch_of(rows)


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column; an error in place of one that Python cannot hold."""
    try:
        return list(column.to_pylist(maps_as_pydicts="strict"))
    except (OverflowError, ValueError, KeyError):
        if len(column) == 1:
            return [EncodeError("the row has a time outside of the years 1 to 9999, or a key of a map twice")]
        return [value for at in range(len(column)) for value in _values(column.slice(at, 1))]


def _of_format(found: RegisteredSchema, value_format: str) -> RegisteredSchema:
    if found.type != SCHEMA_TYPES[value_format]:
        raise PipelineInvalid(f"schema {found.id} is of type {found.type}, and value_format is {value_format}")
    return found
