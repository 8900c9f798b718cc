"""A produce request as it comes over HTTP, and what can be said against it before anything is encoded.

Source: sidecar.md 5.1; the codes of formats are those of the seed document.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec

from headrace import errors
from headrace.formats.codecs import SchemaChoice
from headrace.formats.registry import Reference

T = TypeVar("T")

_FORMAT_CODES: Final = ("binary", "avro", "json", "jsonschema", "protobuf", "string")
_ORIGINAL_CODES: Final = ("binary", "json", "avro", "jsonschema", "protobuf", "string")


_Name = Annotated[
    str,
    msgspec.Meta(
        description="Name of a format, in any case.",
        extra_json_schema={"enum": [*_FORMAT_CODES, *(name.upper() for name in _FORMAT_CODES)]},
    ),
]
_Code = Annotated[
    int,
    msgspec.Meta(
        description=", ".join(f"{code} {name}" for code, name in enumerate(_FORMAT_CODES)) + ".",
        extra_json_schema={"enum": [*range(len(_FORMAT_CODES))]},
    ),
]
_Partition = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_MOST_HEADERS: Final = 256
_RECORD_WEIGHT: Final = 4
"""As much work as so many headers."""
_SLICE_WEIGHT: Final = 1000 * _RECORD_WEIGHT
_FewHeaders = msgspec.Meta(max_length=_MOST_HEADERS)


class ProduceRecord(msgspec.Struct, forbid_unknown_fields=True, rename="camel", gc=False):
    """One record of a request; a key or value that is null or not there is no key, or a tombstone."""

    key: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    value: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    partition: _Partition | None = None
    timestamp: _Long | None = None
    traceability_id: str | None = None
    correlation_id: str | None = None
    headers: (
        Annotated[dict[str, str | None], _FewHeaders] | Annotated[list[tuple[str, str | None]], _FewHeaders] | None
    ) = None


class CountedRecord(ProduceRecord, rename="camel", gc=False):
    """A record that is counted while its body is decoded, so that a body with too many ends before it is objects."""

    decoded: ClassVar = 0
    """How many the body has had so far; one body is decoded at a time."""
    limit: ClassVar = 0

    def __post_init__(self) -> None:
        CountedRecord.decoded += 1
        if CountedRecord.decoded > CountedRecord.limit:
            raise too_many_records(CountedRecord.limit)


class _LenientRecord(CountedRecord, forbid_unknown_fields=False, rename="camel", gc=False):
    pass


class SchemaChoices(msgspec.Struct, rename="camel", gc=False):
    """How keys and values are written, as a request names it."""

    key_format: _Name | _Code | None = None
    value_format: _Name | _Code | None = None
    key_schema: str | None = None
    value_schema: str | None = None
    key_schema_id: _Number | None = None
    value_schema_id: _Number | None = None
    key_schema_version: _Number | None = None
    value_schema_version: _Number | None = None
    key_schema_subject: str | None = None
    value_schema_subject: str | None = None
    key_schema_references: tuple[Reference, ...] = ()
    value_schema_references: tuple[Reference, ...] = ()
    key_schema_message: str | None = None
    value_schema_message: str | None = None


class ProduceRequest(SchemaChoices, kw_only=True, forbid_unknown_fields=True, rename="camel", gc=False):
    """What `POST /producers/{topic}` takes."""

    records: list[ProduceRecord]


class _CountedRequest(ProduceRequest, kw_only=True, rename="camel", gc=False):
    records: list[CountedRecord]  # type: ignore[assignment]  # they are only read


class _LenientRequest(ProduceRequest, kw_only=True, forbid_unknown_fields=False, rename="camel", gc=False):
    records: list[_LenientRecord]  # type: ignore[assignment]  # they are only read


class ParsedRequest(NamedTuple):
    """A request, and the names of its fields that were ignored."""

    request: ProduceRequest
    ignored: Sequence[str] = ()


_decode_request = msgspec.json.Decoder(ProduceRequest).decode
_decode_counted = msgspec.json.Decoder(_CountedRequest).decode
_decode_lenient = msgspec.json.Decoder(_LenientRequest).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_record_fields = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_REQUEST_FIELDS: Final = ProduceRequest.__struct_encode_fields__
_RECORD_FIELDS: Final = ProduceRecord.__struct_encode_fields__
NEITHER: Final = "has neither key nor value: name one of them; a tombstone is written as value: null"
_SHOWN_FIELDS: Final = 20
_SHOWN_CHARACTERS: Final = 300
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.+?)`")
_IN_RECORD: Final = re.compile(r"\$\.records\[(\d+)\]")


_CHOICE: Final = ("schema", "schema_id", "schema_version", "schema_subject", "schema_references", "schema_message")
_choice_of: Final = {
    part: attrgetter(f"{part}_format", *(f"{part}_{field}" for field in _CHOICE)) for part in ("key", "value")
}


_NOTHING: Final = SchemaChoice()


def choice_of(
    request: SchemaChoices, part: Literal["key", "value"], codes: Literal["seed", "original"] = "seed"
) -> SchemaChoice:
    """Return how a request's keys or values are written; `codes` is what formats given as numbers mean.

    Raises:
        InvalidRequest: The format is a number that stands for none.
    """
    said = _choice_of[part](request)
    if said == _NOTHING:  # the usual case, and this runs for every request
        return _NOTHING
    given, *rest = said
    return SchemaChoice(_format(given, _FORMAT_CODES if codes == "seed" else _ORIGINAL_CODES), *rest)


def parse_request(body: bytes, max_records: int, unknown_fields: Literal["refuse", "ignore"]) -> ParsedRequest:
    """Return a request read from its JSON text.

    Raises:
        RequestBodyMissing, ContentTypeMismatch, InvalidRequest, TooManyRecords: It is none, or too
            large; the error names the record at fault.
    """
    few = body.count(b"{") <= max_records + 1  # the request's own brace, and at least one per record
    try:
        request = parse_json(body, _decode_request) if few else parse_counted(body, _decode_counted, max_records)
        ignored: Sequence[str] = ()
    except msgspec.ValidationError as cause:
        if unknown_fields == "refuse" or not _UNKNOWN_FIELD.search(str(cause)):
            raise _invalid(cause) from cause
        request, ignored = _parse_lenient(body, max_records)
    check_present(request.records)
    return ParsedRequest(request, ignored)


def _parse_lenient(body: bytes, max_records: int) -> tuple[ProduceRequest, Sequence[str]]:
    """Return a request without its unknown fields, and their names."""
    try:
        request = parse_counted(body, _decode_lenient, max_records)
    except msgspec.ValidationError as cause:
        raise _invalid(cause) from cause
    fields = _decode_fields(body)
    names = {name: None for name in fields if name not in _REQUEST_FIELDS}
    for record in _decode_record_fields(fields["records"]):
        names.update((f"records.{name}", None) for name in record if name not in _RECORD_FIELDS)
    return request, [name[:_SHOWN_CHARACTERS] for name in names][:_SHOWN_FIELDS]


def check_present(records: Sequence[ProduceRecord]) -> None:
    """Return if every record names a key or a value.

    Raises:
        InvalidRequest: One has neither, and would be a tombstone by accident; the error names it.
    """
    absent = [index for index, record in enumerate(records) if not record.value and not record.key]
    if absent:
        raise errors.InvalidRequest(f"record {absent[0]} {NEITHER}", index=absent[0])


def too_many_records(limit: int) -> errors.TooManyRecords:
    """Return the error for a request with more records than may come at once."""
    return errors.TooManyRecords(
        f"more than {limit} records came at once (http.max_records): send several requests", limit_records=limit
    )


def parse_counted(body: bytes, decode: Callable[[bytes], T], max_records: int) -> T:
    """Return what a body of counted records holds; see `parse_json`.

    Raises:
        TooManyRecords: There are more than may be; the rest was not decoded.
    """
    CountedRecord.decoded, CountedRecord.limit = 0, max_records
    return parse_json(body, decode)


def parse_json(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Return what a body holds; `decode` may raise that it does not fit.

    Raises:
        RequestBodyMissing, ContentTypeMismatch, InvalidRequest: It is no JSON text, or too deep.
    """
    if not body:
        raise errors.RequestBodyMissing()
    try:
        str(body, "utf-8")  # the decoder does not look into raw values
        return decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise errors.ContentTypeMismatch(f"the body is not JSON text: {cause}") from cause
    except RecursionError as cause:
        raise errors.InvalidRequest("the body is nested too deeply: 900 levels are the most") from cause


def _invalid(cause: msgspec.ValidationError) -> errors.InvalidRequest:
    said = str(cause)
    if place := _IN_RECORD.search(said):
        said = explained(_IN_RECORD.sub("$", said), _RECORD_FIELDS)
        return errors.InvalidRequest(f"record {place[1]} of the request is not one: {said}", index=int(place[1]))
    return errors.InvalidRequest(f"the body is no produce request: {explained(said, _REQUEST_FIELDS)}")


def explained(said: str, known: Iterable[str]) -> str:
    """Return what the decoder says, cut, with the nearest known name for a field that is not known."""
    said = said[:_SHOWN_CHARACTERS]  # it may quote the body
    unknown = _UNKNOWN_FIELD.search(said)
    others = [name for name in known if unknown and name != unknown[1]]  # it may only stand at the wrong place
    near = difflib.get_close_matches(unknown[1], others, 1, 0.5) if unknown else []
    return f"{said}. Did you mean {near[0]}?" if near else said


def _format(given: str | int | None, codes: Sequence[str]) -> str | None:
    if not isinstance(given, int):
        return given
    if not 0 <= given < len(codes):
        raise errors.InvalidRequest(f"format {given} is not served: as a number, 0 to {len(codes) - 1} are")
    return codes[given]


class Slice(NamedTuple):
    """Records of a request that are worked on without a pause, and the number of the first."""

    first: int
    records: list[ProduceRecord]


def slices_of(records: list[ProduceRecord]) -> list[Slice]:
    """Return a request in slices that take a few milliseconds each; records count, and so do their headers."""
    if len(records) <= _SLICE_WEIGHT // (
        _MOST_HEADERS + _RECORD_WEIGHT
    ):  # the usual case, and this runs for every request
        return [Slice(0, records)]
    weights = [_RECORD_WEIGHT + len(record.headers or ()) for record in records]
    if sum(weights) <= _SLICE_WEIGHT:
        return [Slice(0, records)]
    slices, first, held = [], 0, 0
    for index, weight in enumerate(weights):
        if held and held + weight > _SLICE_WEIGHT:
            slices.append(Slice(first, records[first:index]))
            first, held = index, 0
        held += weight
    return [*slices, Slice(first, records[first:])]


def check_partitions(records: list[ProduceRecord], topic: str, partitions: int, first: int = 0) -> None:
    """Return if a topic has the partitions that records name; `first` is the number of the first record.

    Raises:
        PartitionNotFound: It has not; the error names the record.
    """
    for index, record in enumerate(records, first):
        if record.partition is not None and record.partition >= partitions:
            raise errors.PartitionNotFound(
                f"record {index} names partition {record.partition}, and topic {topic} has {partitions}, "
                "counted from 0: nothing was sent",
                topic=topic,
                partition=record.partition,
                index=index,
            )
