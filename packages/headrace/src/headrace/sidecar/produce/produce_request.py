"""The body of a produce request: its types, its parser, and all checks before the encoding."""

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec

from headrace import errors
from headrace.config.format_list import FORMATS
from headrace.config.spelling import nearest
from headrace.formats.choice import SchemaChoice
from headrace.formats.registry import Reference
from headrace.records import OutgoingRecord

T = TypeVar("T")

FORMAT_CODES: Final[Mapping[Literal["documented", "light-4j"], Sequence[str]]] = {
    "documented": sorted(FORMATS, key=lambda name: FORMATS[name].code),
    "light-4j": sorted(FORMATS, key=lambda name: FORMATS[name].light_4j_code),
}
"""Formats by number, for each value of `producer.format_codes`."""
MAX_DEPTH: Final = 64
_DOCUMENTED: Final = FORMAT_CODES["documented"]
_Name = Annotated[
    str,
    msgspec.Meta(
        description="Name of a format, in any case.",
        extra_json_schema={"enum": [*_DOCUMENTED, *(name.upper() for name in _DOCUMENTED)]},
    ),
]
_Code = Annotated[
    int,
    msgspec.Meta(
        description=", ".join(f"{code} {name}" for code, name in enumerate(_DOCUMENTED)) + ".",
        extra_json_schema={"enum": [*range(len(_DOCUMENTED))]},
    ),
]
_Partition = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_MAX_HEADERS: Final = 256
_RECORD_WEIGHT: Final = 4
"""The work for a record without headers, in units of one header."""
_SLICE_WEIGHT: Final = 1000 * _RECORD_WEIGHT
SHORT_RECORDS: Final = _SLICE_WEIGHT // (_MAX_HEADERS + _RECORD_WEIGHT)
"""Up to this number, records always fit into one slice."""
_FewHeaders = msgspec.Meta(max_length=_MAX_HEADERS)


class ProduceRecord(msgspec.Struct, forbid_unknown_fields=True, rename="camel", gc=False):
    """One record of a request. Null and absent are the same: no key, or a tombstone."""

    one_required: ClassVar = ("key", "value")
    """For the API document."""
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
    """A record that is counted while the body is decoded, so that decoding stops at the limit."""

    decoded: ClassVar = 0
    """Records decoded so far; one body is decoded at a time."""
    limit: ClassVar = 0

    def __post_init__(self) -> None:
        CountedRecord.decoded += 1
        if CountedRecord.decoded > CountedRecord.limit:
            raise errors.TooManyRecords(
                f"more than {CountedRecord.limit} records in one request: send several requests",
                limit_records=CountedRecord.limit,
            )


class _LenientRecord(CountedRecord, forbid_unknown_fields=False, rename="camel", gc=False):
    pass


class SchemaChoices(msgspec.Struct, rename="camel", gc=False):
    """The formats and schemas of keys and values in a request."""

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
    """The body of `POST /producers/{topic}`."""

    records: list[ProduceRecord]


class _CountedRequest(ProduceRequest, kw_only=True, rename="camel", gc=False):
    records: list[CountedRecord]  # type: ignore[assignment]  # they are only read


class _LenientRequest(ProduceRequest, kw_only=True, forbid_unknown_fields=False, rename="camel", gc=False):
    records: list[_LenientRecord]  # type: ignore[assignment]  # they are only read


_decode_request = msgspec.json.Decoder(ProduceRequest).decode
_decode_counted = msgspec.json.Decoder(_CountedRequest).decode
_decode_lenient = msgspec.json.Decoder(_LenientRequest).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_record_fields = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_REQUEST_FIELDS: Final = ProduceRequest.__struct_encode_fields__
_RECORD_FIELDS: Final = ProduceRecord.__struct_encode_fields__
NEITHER: Final = "has neither key nor value: send one of them; a tombstone is value: null"
_SHOWN_FIELDS: Final = 20
_SHOWN_CHARACTERS: Final = 300
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.+?)`")
_IN_RECORD: Final = re.compile(r"\$\.records\[(\d+)\]")
_CHOICE: Final = ("schema", "schema_id", "schema_version", "schema_subject", "schema_references", "schema_message")
_choice_of: Final = {
    part: attrgetter(f"{part}_format", *(f"{part}_{field}" for field in _CHOICE)) for part in ("key", "value")
}
_NO_CHOICE: Final = SchemaChoice()
_all_choices: Final = attrgetter(*SchemaChoices.__struct_fields__)
_NO_CHOICES: Final = _all_choices(SchemaChoices())
SHALLOW_BYTES: Final = 2 * MAX_DEPTH + 1
"""Shorter texts are never nested too deeply."""
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_STEPS: Final = bytes(1 if byte in b"[{" else 255 if byte in b"]}" else 0 for byte in range(256))
_NO_STEPS: Final = bytes(byte for byte in range(256) if not _STEPS[byte])


def choice_of(
    request: SchemaChoices, part: Literal["key", "value"], codes: Literal["documented", "light-4j"] = "documented"
) -> SchemaChoice:
    """Return the format and schema of a request's keys or values; `codes` maps numbers to formats.

    Raises:
        InvalidRequest: No format has this number.
    """
    found = _choice_of[part](request)
    if found == _NO_CHOICE:  # the usual case, and this runs for every request
        return _NO_CHOICE
    given, *rest = found
    if isinstance(given, int):
        names = FORMAT_CODES[codes]
        if not 0 <= given < len(names):
            raise errors.InvalidRequest(f"format {given} is not valid: formats as numbers are 0 to {len(names) - 1}")
        given = names[given]
    return SchemaChoice(given, *rest)


class ParsedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request."""

    request: ProduceRequest
    ignored: Sequence[str] = ()
    """Names of its unknown fields."""
    size_bytes: int | None = None
    """The size of its text, if it is all of a body."""
    has_choice: bool = True
    """Whether it names a format or schema, as far as that is known."""


def parse_request(max_records: int, unknown_fields: Literal["refuse", "ignore"], body: bytes) -> ParsedRequest:
    """Parse the JSON text of a request.

    Raises:
        RequestBodyMissing, ContentTypeMismatch, InvalidRequest, TooManyRecords: It is not a request, or too large.
            The error names the record at fault.
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
    return ParsedRequest(request, ignored, len(body), _all_choices(request) != _NO_CHOICES)


def _parse_lenient(body: bytes, max_records: int) -> tuple[ProduceRequest, list[str]]:
    try:
        request = parse_counted(body, _decode_lenient, max_records)
    except msgspec.ValidationError as cause:
        raise _invalid(cause) from cause
    fields = _decode_fields(body)
    names = {name: None for name in fields if name not in _REQUEST_FIELDS}
    for record in _decode_record_fields(fields["records"]):
        names.update((f"records.{name}", None) for name in record if name not in _RECORD_FIELDS)
    return request, [name[:_SHOWN_CHARACTERS] for name in names][:_SHOWN_FIELDS]


def parse_counted(body: bytes, decode: Callable[[bytes], T], max_records: int) -> T:
    """Parse a body of counted records; see `parse_json`.

    Raises:
        TooManyRecords: There are more than the limit; the rest was not decoded.
    """
    CountedRecord.decoded = 0
    CountedRecord.limit = max_records
    return parse_json(body, decode)


def parse_json(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Parse a body; `decode` may raise `msgspec.ValidationError`.

    Raises:
        RequestBodyMissing, ContentTypeMismatch, InvalidRequest: It is not JSON text, or nested too deeply.
    """
    if not body:
        raise errors.RequestBodyMissing()
    try:
        if not body.isascii():
            str(body, "utf-8")  # the decoder does not check raw values
        return decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise errors.ContentTypeMismatch(f"the body is not JSON text: {cause}") from cause
    except RecursionError as cause:
        raise errors.InvalidRequest("the body is nested too deeply: the limit is 900 levels") from cause


def _invalid(cause: msgspec.ValidationError) -> errors.InvalidRequest:
    text = str(cause)
    if found := _IN_RECORD.search(text):
        text = explained(_IN_RECORD.sub("$", text), _RECORD_FIELDS)
        return errors.InvalidRequest(f"record {found[1]} of the request is not valid: {text}", index=int(found[1]))
    return errors.InvalidRequest(f"the body is not a valid produce request: {explained(text, _REQUEST_FIELDS)}")


def explained(text: str, known: Iterable[str]) -> str:
    """Return a decoder's error, shortened; suggest the most similar name for an unknown field."""
    text = text[:_SHOWN_CHARACTERS]  # it may quote the body
    unknown = _UNKNOWN_FIELD.search(text)
    others = [name for name in known if unknown and name != unknown[1]]  # it may be valid at another level
    near = nearest(unknown[1], others) if unknown else ""
    return f"{text}. Did you mean {near}?" if near else text


def check_present(records: Sequence[ProduceRecord]) -> None:
    """Raise InvalidRequest if a record has neither key nor value: it would be a tombstone by accident."""
    for index, record in enumerate(records):
        if not record.value and not record.key:
            raise errors.InvalidRequest(f"record {index} {NEITHER}", index=index)


def check_partitions(
    records: Sequence[ProduceRecord | OutgoingRecord], topic: str, partitions: int, first: int = 0
) -> None:
    """Raise PartitionNotFound unless the topic has the records' partitions; `first` is the first record's number."""
    for index, record in enumerate(records, first):
        if record.partition is not None and record.partition >= partitions:
            raise errors.PartitionNotFound(
                f"record {index} is for partition {record.partition}, but topic {topic} has {partitions} partitions, "
                "counted from 0; nothing was sent",
                topic=topic,
                partition=record.partition,
                index=index,
            )


def check_depth(texts: Sequence[bytes | None], first: int = 0) -> None:
    """Raise InvalidRequest if keys or values, valid JSON, are nested too deeply; `first` is the number of the first."""
    if sum([len(text) for text in texts if text]) < SHALLOW_BYTES:  # a short record, and this runs for every request
        return
    given = [*filter(None, texts)]
    # For speed, the first test also counts brackets in strings. They may hide a deep nesting, which is harmless: every
    # parser of the text has a limit too.
    if len(max(given, key=len, default=b"")) < SHALLOW_BYTES or _depth(b"".join(given)) <= MAX_DEPTH:
        return
    for index, text in enumerate(texts, first):
        if text and _depth(_STRING.sub(b"", text)) > MAX_DEPTH:
            raise errors.InvalidRequest(
                f"record {index} is nested deeper than {MAX_DEPTH} levels; nothing was sent", index=index
            )


def _depth(text: bytes) -> int:
    return max(accumulate(array("b", text.translate(_STEPS, _NO_STEPS))), default=0)


class Slice(NamedTuple):
    """Records of a request that are processed in one turn, and the number of the first."""

    first: int
    records: list[ProduceRecord]


def slices_of(records: list[ProduceRecord]) -> list[Slice]:
    """Split a request into slices of a few milliseconds each, by the number of records and headers."""
    if len(records) <= SHORT_RECORDS:  # the usual case, and this runs for every request
        return [Slice(0, records)]
    weights = [_RECORD_WEIGHT + len(record.headers or ()) for record in records]
    if sum(weights) <= _SLICE_WEIGHT:
        return [Slice(0, records)]
    slices = []
    first = 0
    total = 0
    for index, weight in enumerate(weights):
        if total and total + weight > _SLICE_WEIGHT:
            slices.append(Slice(first, records[first:index]))
            first = index
            total = 0
        total += weight
    return [*slices, Slice(first, records[first:])]
