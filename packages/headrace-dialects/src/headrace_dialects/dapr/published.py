"""What is published as a record: its key, its headers, and its value, which is an event unless the request says raw.

Source: Dapr's pub/sub API 1.0 and its component for Kafka; CloudEvents 1.0.2.
"""

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from headrace.errors import InvalidRequest
from headrace.records import Header, OutgoingRecord
from headrace.runtime import chance

EVENT: Final = "application/cloudevents+json"
_PREFIX: Final = "metadata."
_KEYS: Final = ("partitionKey", "__key")
_OVERRIDE: Final = "cloudevent."
_FOR_DAPR: Final = ("rawPayload", "maxBulkPubBytes", *_KEYS)
"""Names that are not headers of the record."""
_TRUE: Final = ("1", "t", "T", "true", "TRUE", "True")
_NAME: Final = re.compile(r"[a-z0-9]{1,100}")
_REFUSED: Final = {
    "ttlInSeconds": "records expire by their topic: set retention.ms there",
    "valueSchemaType": "write such records by POST /producers/{topic} with valueFormat",
    "keySchemaType": "write such records by POST /producers/{topic} with keyFormat",
}
_REQUIRED: Final = ("specversion", "id", "source", "type")
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str | None).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Publication(NamedTuple):
    """Where a request publishes, and what all of its records have."""

    pubsub: str
    topic: str
    now: float
    """Seconds since the epoch."""
    trace: Mapping[str, str]
    """`traceparent` and `tracestate` of the request."""


def metadata_of(query: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata in the query of a request."""
    return {name.removeprefix(_PREFIX): text for name, text in query.items() if name.startswith(_PREFIX)}


def record_of(target: Publication, body: bytes, content_type: str, metadata: Mapping[str, str]) -> OutgoingRecord:
    """Return the record of one event.

    Raises:
        InvalidRequest: Its metadata asks for what Kafka does not have, or it is an event that is not whole.
    """
    for name, advice in _REFUSED.items():
        if name in metadata:
            raise InvalidRequest(f"metadata.{name} is not supported: {advice}")
    kind = content_type.partition(";")[0].strip().lower()
    event_key = _key_of_event(body) if kind == EVENT else None
    is_raw = metadata.get("rawPayload") in _TRUE
    if not is_raw and kind != EVENT:
        body, content_type = _encode(_wrapped(target, body, content_type or "text/plain", metadata)), EVENT
    own = [n for n in metadata if n not in _FOR_DAPR and not n.startswith(_OVERRIDE)]
    headers: list[Header] = [("content-type", content_type.encode())] if content_type else []
    headers += [(name, metadata[name].encode()) for name in own]
    key = next((metadata[name].encode() for name in _KEYS if name in metadata), event_key)
    return OutgoingRecord(target.topic, key, body, headers)


def _wrapped(target: Publication, body: bytes, content_type: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": str(chance.uuid4()),
        "source": "headrace",
        "type": "com.dapr.event.sent",
        "time": datetime.fromtimestamp(target.now, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "topic": target.topic,
        "pubsubname": target.pubsub,
        **target.trace,
        "datacontenttype": content_type,
    }
    for name, text in metadata.items():
        attribute = name.removeprefix(_OVERRIDE)
        if attribute != name and (attribute in ("specversion", "data") or not _NAME.fullmatch(attribute) or not text):
            raise InvalidRequest(f"metadata.{name[:100]} is empty, or not an attribute that can be set: remove it")
        if attribute != name:
            event[attribute] = text
    return event | _data_of(body, content_type.partition(";")[0].strip().lower())


def _key_of_event(body: bytes) -> bytes | None:
    """Return the partition key of an event that is published as it is; InvalidRequest if it is not whole."""
    try:
        members = _decode_members(body)
        found = {name: _decode_text(members[name]) for name in (*_REQUIRED, "partitionkey") if name in members}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"the body is not a CloudEvent in JSON: {str(cause)[:200]}") from cause
    if missing := [name for name in _REQUIRED if not found.get(name)]:
        raise InvalidRequest(f"the CloudEvent is not complete: send also {', '.join(missing)}")
    if found["specversion"] != "1.0":
        raise InvalidRequest("the CloudEvent has another specversion: send events of version 1.0")
    key = found.get("partitionkey")
    return None if key is None else key.encode()


def _data_of(body: bytes, kind: str) -> dict[str, Any]:
    try:
        text = body.decode()
        if kind.endswith(("/json", "+json")):
            return {"data": _json_of(body, text)}
        if kind.startswith("text/") or kind.endswith("xml"):
            return {"data": text}
    except UnicodeDecodeError:
        pass
    return {"data_base64": base64.b64encode(body).decode()}


def _json_of(body: bytes, text: str) -> Any:
    """Return JSON text as it is, and as a string what is not JSON, as Dapr does."""
    try:
        _decode_any(body)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return msgspec.Raw(body)
