"""`/topics`: records of a partition for tools, which read them without an instance or a group."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace import errors
from headrace.config.active import ActiveConsumersConfig
from headrace.errors import InvalidRequest, OffsetOutOfRange, TooManyRequests, TopicInternal
from headrace.formats.choice import Codecs
from headrace.formats.stored_values import AUTO
from headrace.http.auth.principals import READ
from headrace.http.endpoint import KAFKA, Call, Endpoint, Rule
from headrace.http.messages import HttpResponse
from headrace.kafka import Admin, read_slice, window
from headrace.kafka.names import check_topic
from headrace.records import Record, RecordBatch, TopicPartition
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.audit_events import Consumption
from headrace.runtime.telemetry.correlation import caller
from headrace.sidecar.active.read_entries import EntryWriter, FoundEntries
from headrace.sidecar.active.requests import ConsumedRecord
from headrace.sidecar.record_json import fitting

_LIMIT_SECONDS: Final = 5.0
_READS: Final = 4
_Bytes = Annotated[int, Meta(ge=1, le=2_097_152)]


class SliceQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Selects records of a partition."""

    offset: Annotated[int, Meta(ge=0, le=2**63 - 2)] | None = None
    """By default the first one of the log."""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Most records."""
    max_bytes: _Bytes = 204_800
    """Most bytes of keys and values; a larger first record is returned alone."""
    max_bytes_camel: _Bytes | None = msgspec.field(default=None, name="maxBytes")
    format: str | None = None
    """Format of keys and values; by default those of `active_consumers`. `auto`: the one that fits each of them."""
    key_format: str | None = msgspec.field(default=None, name="keyFormat")
    value_format: str | None = msgspec.field(default=None, name="valueFormat")
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"


class SliceResponse(msgspec.Struct):
    """Records of a partition, and where to continue."""

    records: list[ConsumedRecord]
    next_offset: int
    """The offset to request next; `end_offset` if nothing follows yet."""
    first_offset: int
    end_offset: int


@dataclasses.dataclass(eq=False)
class TopicEndpoints:
    """Returns records of topics, a few requests at a time. It joins no group and stores no position."""

    _settings: ActiveConsumersConfig
    _admin: Admin
    _codecs: Codecs
    _kind_of: Callable[[str], str]
    """Returns the kind of an internal topic, empty for other topics."""
    _audit: Audit | None
    _reads: int = 0

    @Endpoint(
        "GET",
        "/topics/{topic}/partitions/{partition}/records",
        "getRecords",
        "Records of a partition from an offset on, without an instance or a group",
        Rule((READ,), "consume", "topic"),
        {200: SliceResponse},
        errors=(*KAFKA, errors.RegistryUnavailable, errors.OffsetOutOfRange, errors.TopicInternal),
    )
    async def records(self, call: Call[None, SliceQuery]) -> HttpResponse:
        query = call.query
        settings = self._settings
        topic = check_topic(call.parameters["topic"])
        number = call.parameters["partition"]
        if not re.fullmatch("[0-9]{1,9}", number):
            raise InvalidRequest(f"partition {number[:60]!r} is not a number", parameter="partition")
        if self._kind_of(topic) == "state":
            raise TopicInternal(f"{topic} is internal: its records are not readable here", topic=topic)
        entries: EntryWriter | FoundEntries = FoundEntries(self._codecs)
        if query.format != AUTO or query.key_format or query.value_format:
            keys = self._codecs.for_reading(query.key_format or query.format or settings.key_format)
            values = self._codecs.for_reading(query.value_format or query.format or settings.value_format)
            entries = EntryWriter("", keys, values)
        if self._reads >= _READS:
            raise TooManyRequests(f"{_READS} reads of topics are in progress in this process; try again later")
        self._reads += 1
        try:
            records, offsets = await self._read(TopicPartition(topic, int(number)), query)
            batches = [RecordBatch.of(records)] if records else []
            await entries.load(batches)
            text, count = fitting(entries.write(batches), b'{"records":[')
        finally:
            self._reads -= 1
        shown = records[:count]
        if len(shown) < len(records):
            offsets["next_offset"] = records[len(shown)].offset
        if self._audit and shown:
            who = Consumption("ACTIVE_CONSUMER", "", caller=caller.get(), action="read")
            self._audit.consumed(who, shown, sum([record.size_bytes for record in shown]), "delivered", ())
        return HttpResponse(text + b"]," + msgspec.json.encode(offsets)[1:])

    async def _read(self, partition: TopicPartition, query: SliceQuery) -> tuple[Sequence[Record], dict[str, int]]:
        starts, ends = await window(self._admin, partition.topic, partition.partition)
        first = starts[partition]
        end = ends[partition]
        written = (await self._admin.written_offsets([partition]))[partition]
        if query.isolation == "read_uncommitted":
            end = written
        start = first if query.offset is None else query.offset
        if not first <= start <= max(end, written):
            text = f"offset {start} is out of range: {partition} has offsets from {first} to before {end}"
            raise OffsetOutOfRange(text, first_offset=first, end_offset=end)
        records, following = await read_slice(
            self._admin.config,
            partition,
            (start, end),
            count=query.count,
            max_bytes=query.max_bytes_camel or query.max_bytes,
            isolation_level=query.isolation,
            limit_seconds=_LIMIT_SECONDS,
        )
        return records, {"next_offset": following, "first_offset": first, "end_offset": end}
