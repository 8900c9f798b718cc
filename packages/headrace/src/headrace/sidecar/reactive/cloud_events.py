"""Records as CloudEvents: a record that is an event is sent unchanged, any other is wrapped.

Source: CloudEvents 1.0.2 with its JSON format, HTTP binding and Kafka binding; extensions Partitioning and Distributed
Tracing.
"""

import base64
import re
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from headrace.delivery.outcomes import Delivery
from headrace.errors import DecodeError
from headrace.formats.plain import JsonCodec
from headrace.records import Record, RecordBatch
from headrace.sidecar.reactive.delivery_lines import DeliveryLines, headers_text, safe, trace_of
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.record_json import delivery_id

_REQUIRED: Final = ("specversion", "id", "source", "type")
_VERSION: Final = "1.0"
_NAME: Final = re.compile(r"[a-z0-9]{1,100}")  # HTTP clients cache the names of headers
_OTHER_NAMES: Final = ("ce_data", "ce_datacontenttype")
"""Headers that are named like attributes, but are not attributes."""
_MEDIA_TYPE: Final = re.compile(r"[!-~][ -~]*")
_YEAR_10000_MS: Final = 253_402_300_800_000
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_valid_json: Final = JsonCodec().decode


class CloudEvent(NamedTuple):
    """One event."""

    attributes: dict[str, str | int | bool]
    """All but `datacontenttype`."""
    content_type: str
    data: bytes | None


def structured(
    payloads: PayloadDecoder, lines: DeliveryLines, delivery: Delivery, records: RecordBatch
) -> tuple[bytes, bytes]:
    """Return body and header lines of mode `cloudevents_structured`."""
    key = payloads.key_text(records.keys[0])
    event = _json_of(_event_of(payloads, delivery, records[0], key))
    return _encode(event), lines.of_record(delivery, records, key, "application/cloudevents+json")


def binary(
    payloads: PayloadDecoder, lines: DeliveryLines, delivery: Delivery, records: RecordBatch
) -> tuple[bytes, bytes]:
    """Return body and header lines of mode `cloudevents_binary`."""
    key = payloads.key_text(records.keys[0])
    event = _event_of(payloads, delivery, records[0], key)
    more = [
        (f"ce-{name}", safe(str(value).lower() if isinstance(value, bool) else str(value)))
        for name, value in event.attributes.items()
    ]
    if event.data is not None:
        more.append(("Content-Type", event.content_type))
    return event.data or b"", lines.of_record(delivery, records, key, more=more)


def _event_of(payloads: PayloadDecoder, delivery: Delivery, record: Record, key: str | None) -> CloudEvent:
    event = _own_event(payloads, delivery, record, key)
    if delivery.replay:
        event.attributes["headracereplay"] = delivery.replay
    return event


def _own_event(payloads: PayloadDecoder, delivery: Delivery, record: Record, key: str | None) -> CloudEvent:
    own = {name: (data or b"").decode(errors="replace") for name, data in record.headers}
    kind = own.get("content-type", "")
    if record.value is not None and kind.lower().startswith("application/cloudevents+json"):
        return _parse(record.value)
    attributes: dict[str, str | int | bool] = {
        name[3:]: text
        for name, text in own.items()
        if name.startswith("ce_") and _NAME.fullmatch(name[3:]) and text and name not in _OTHER_NAMES
    }
    is_event = all(attributes.get(name) for name in _REQUIRED) and attributes["specversion"] == _VERSION
    if is_event and _MEDIA_TYPE.fullmatch(kind):
        return CloudEvent(attributes, kind, record.value)
    data = None if record.value is None else payloads.body(record.value)
    return CloudEvent(attributes if is_event else _wrapper(delivery, record, key), payloads.content_type, data)


def _wrapper(delivery: Delivery, record: Record, key: str | None) -> dict[str, str | int | bool]:
    headers = record.headers
    attributes: dict[str, str | int | bool] = {
        "specversion": _VERSION,
        "id": delivery_id(delivery, record.offset, headers),
        "source": f"/topics/{record.topic}/partitions/{record.partition}",
        "type": "headrace.record",
        "offset": str(record.offset),  # an Integer of CloudEvents has 32 bits
        "attempt": delivery.attempt,
    }
    if delivery.epoch:
        attributes["epoch"] = delivery.epoch
    if 0 <= record.timestamp_ms < _YEAR_10000_MS:
        time = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")
        attributes["time"] = time.replace("+00:00", "Z")
    if key is not None:
        attributes["partitionkey"] = key
    if headers:
        attributes["recordheaders"] = headers_text(headers)
        attributes.update(trace_of({name.lower(): data for name, data in headers if data}))
    return attributes


def _parse(value: bytes) -> CloudEvent:
    """Read an event in the JSON format, or raise DecodeError."""
    try:
        members = _decode(_valid_json(value))
        attributes = {n: _decode_any(raw) for n, raw in members.items() if n not in ("data", "data_base64")}
        attributes = {name: value for name, value in attributes.items() if value is not None}
        content_type = attributes.pop("datacontenttype", "application/json")
        if not isinstance(content_type, str) or not _MEDIA_TYPE.fullmatch(content_type):
            raise DecodeError("its datacontenttype is not a media type")
        data = _data_of(members, content_type)
    except (DecodeError, msgspec.MsgspecError, ValueError, TypeError, RecursionError) as cause:
        raise DecodeError(f"its content-type says application/cloudevents+json, but it is not one: {cause}") from cause
    wrong = [n for n, v in attributes.items() if not _NAME.fullmatch(n) or not isinstance(v, str | int | bool)]
    missing = [name for name in _REQUIRED if not attributes.get(name)]
    if wrong or missing or attributes["specversion"] != _VERSION:
        raise DecodeError(
            "its content-type says application/cloudevents+json, but it is not a valid CloudEvent 1.0: "
            f"missing={missing}, wrong={len(wrong)} of {len(attributes)} attributes"
        )
    return CloudEvent(attributes, content_type, data)


def _data_of(members: dict[str, msgspec.Raw], content_type: str) -> bytes | None:
    if (packed := _decode_any(members.get("data_base64", b"null"))) is not None:
        return base64.b64decode(packed, validate=True)
    data = bytes(members.get("data", b"null"))
    if data == b"null":
        return None
    text = None if _is_json(content_type) else _decode_any(data)
    return text.encode() if isinstance(text, str) else data


def _json_of(event: CloudEvent) -> dict[str, Any]:
    found: dict[str, Any] = {**event.attributes}
    if event.data is None:
        return found
    found["datacontenttype"] = event.content_type
    if _is_json(event.content_type):
        return {**found, "data": msgspec.Raw(_valid_json(event.data))}
    try:
        if _media(event.content_type).startswith("text/") or _media(event.content_type).endswith("xml"):
            return {**found, "data": event.data.decode()}
    except UnicodeDecodeError:
        pass
    return {**found, "data_base64": base64.b64encode(event.data).decode()}


def _media(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_json(content_type: str) -> bool:
    media = _media(content_type)
    return media in ("application/json", "text/json") or media.endswith("+json")
