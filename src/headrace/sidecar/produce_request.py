"""A produce request as it comes over HTTP, and what can be said against it before anything is encoded.

Source: sidecar.md 5.1; the codes of formats are those of the seed document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Final, Literal, TypeVar

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


class ProduceRecord(msgspec.Struct, rename="camel", gc=False):
    """One record of a request; a key or value that is null or not there is no key, or a tombstone."""

    key: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    value: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    partition: _Partition | None = None
    timestamp: _Long | None = None
    traceability_id: str | None = None
    correlation_id: str | None = None
    headers: dict[str, str | None] | list[tuple[str, str | None]] | None = None


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


class ProduceRequest(SchemaChoices, kw_only=True, rename="camel", gc=False):
    """What `POST /producers/{topic}` takes."""

    records: list[ProduceRecord]


class _Outline(msgspec.Struct, gc=False):
    records: list[msgspec.Raw]


_decode_request = msgspec.json.Decoder(ProduceRequest).decode
_decode_outline = msgspec.json.Decoder(_Outline).decode
_decode_record = msgspec.json.Decoder(ProduceRecord).decode


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


def parse_request(body: bytes) -> ProduceRequest:
    """Return a request read from its JSON text.

    Raises:
        RequestBodyMissing, ContentTypeMismatch, InvalidRequest: It is none; the error names the record at fault.
    """
    try:
        return parse_json(body, _decode_request)
    except msgspec.ValidationError as cause:
        raise _invalid(body, cause) from cause


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


def _invalid(body: bytes, cause: msgspec.ValidationError) -> errors.InvalidRequest:
    """Say which record does not fit; the decoder's own text has no index."""
    try:
        records = _decode_outline(body).records
    except msgspec.DecodeError:
        return errors.InvalidRequest(f"the body is no produce request: {cause}")
    for index, raw in enumerate(records):
        try:
            _decode_record(raw)
        except msgspec.ValidationError as misfit:
            return errors.InvalidRequest(f"record {index} of the request is not one: {misfit}", index=index)
    return errors.InvalidRequest(f"the body is no produce request: {cause}")


def _format(given: str | int | None, codes: Sequence[str]) -> str | None:
    if not isinstance(given, int):
        return given
    if not 0 <= given < len(codes):
        raise errors.InvalidRequest(f"format {given} is not served: as a number, 0 to {len(codes) - 1} are")
    return codes[given]


def check_partitions(records: list[ProduceRecord], topic: str, partitions: int) -> None:
    """Return if a topic has the partitions that records name.

    Raises:
        PartitionNotFound: It has not; the error names the record.
    """
    for index, record in enumerate(records):
        if record.partition is not None and record.partition >= partitions:
            raise errors.PartitionNotFound(
                f"record {index} names partition {record.partition}, and topic {topic} has {partitions}, "
                "counted from 0: nothing was sent",
                topic=topic,
                partition=record.partition,
                index=index,
            )
