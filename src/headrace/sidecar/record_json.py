"""Records as JSON texts in the shape of the light-4j kafka-sidecar's consumer record, for deliveries and for reads.

Source: light-4j kafka-sidecar, `/consumers` (the fields of a record).
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.delivery.dead_letter import REDRIVE_OF
from headrace.delivery.outcomes import Delivery
from headrace.records import CORRELATION_ID, Header, TopicPartition

Row = tuple[str, int, Sequence[Header] | None, bytes | None, bytes | None]
"""A record: offset as text, timestamp, headers if it has any, key and value as JSON texts. None leaves out one."""
PARTS: Final = 3
"""Parts of the JSON object of one record: before its value, its value, and the end. The first begins with a comma. So a
value is copied only once, into the body."""
_encode = msgspec.json.Encoder().encode


def delivery_id(delivery: Delivery, offset: int | str, headers: Sequence[Header]) -> str:
    """Return the id of a record's deliveries, which is the same in every attempt and after a redrive."""
    position = next((data for name, data in headers if name == REDRIVE_OF and data), None) if headers else None
    topic, partition = delivery.partition
    where = position.decode(errors="replace") if position else f"{topic}:{partition}:{offset}"
    return f"{delivery.group}:{where}"


def write_records(
    group: str,
    partition: TopicPartition,
    rows: Iterable[Row],
    *,
    assignment: str = "",
    delivery: Delivery | None = None,
) -> list[bytes]:
    """Return the parts of one JSON object per record of a partition: `PARTS` of each, one record after the other.

    A record without a correlation id gets its id as one.

    Args:
        group: Begins the ids; they have none if it is empty.
        assignment: The name of the partition's assignment, for records of a read.
        delivery: Adds the id, attempt and epoch of a delivery. Its headers are plain texts, and null is empty.
    """
    topic, number = partition
    start = f',{{"topic":{quote(topic)},"partition":{number},"offset":'
    middle = f',"assignment":"{assignment}","timestamp":' if assignment else ',"timestamp":'
    # All ids of a partition begin with the same characters.
    identity = quote(f"{group}:{topic}:{number}:" if group else f"{topic}:{number}:")[:-1]
    only, other = f',"headers":{{"{CORRELATION_ID}":{identity}', f',"deliveryId":{identity}'
    tail, end = b"}", _end_of(delivery) if delivery else ""
    parts: list[bytes] = []
    for offset, timestamp_ms, headers, key, value in rows:
        if not headers:
            head = f'{only}{offset}"}}'
            if delivery is not None:
                tail = f'{other}{offset}"{end}'.encode()
        elif delivery is not None:
            own = quote(delivery_id(delivery, offset, headers))
            head, tail = f',"headers":{_plain_headers(headers, own)}', f',"deliveryId":{own}{end}'.encode()
        else:
            own = f'{identity}{offset}"'
            head = f',"headers":{exact_headers(headers, own)}'
        before = f"{start}{offset}{middle}{timestamp_ms}{head}"
        if key is not None:
            before = f'{before},"key":{key.decode()}'
        if value is not None:
            before += ',"value":'
        parts += before.encode(), value or b"", tail
    return parts


def join_array(parts: Sequence[bytes], start: bytes = b"[", end: bytes = b"]") -> bytes:
    """Return the objects of records as a JSON array between `start` and `end`."""
    return b"".join([start, parts[0][1:], *parts[1:], end]) if parts else start + end


def _end_of(delivery: Delivery) -> str:
    epoch = f',"epoch":{delivery.epoch}' if delivery.epoch else ""
    replay = f',"replay":{quote(delivery.replay)}' if delivery.replay else ""
    return f',"attempt":{delivery.attempt}{epoch}{replay}}}'


def _plain_headers(headers: Sequence[Header], own_id: str) -> str:
    texts = {name: (data or b"").decode(errors="replace") for name, data in headers}
    written = _encode(texts).decode()
    return written if CORRELATION_ID in texts else f'{written[:-1]},"{CORRELATION_ID}":{own_id}}}'


def exact_headers(headers: Sequence[Header], own_id: str) -> str:
    """Return headers as a JSON object, and where that cannot hold them exactly, also as a list `headerList`.

    `own_id` is JSON text: the correlation id of a record without one.
    """
    texts: dict[str, str | None] = {}
    exact = True
    for name, data in headers:
        text = None if data is None else data.decode(errors="replace")
        exact = exact and name not in texts and data is not None and "\ufffd" not in (text or "")
        texts[name] = text
    written = _encode(texts).decode()
    if CORRELATION_ID not in texts:
        written = f'{written[:-1]}{"," if texts else ""}"{CORRELATION_ID}":{own_id}}}'
    if exact:
        return written
    pairs = [{"name": name, "value": data} for name, data in headers]  # bytes are base64 in msgspec's JSON
    return f'{written},"headerList":{quote(pairs)}'


def quote(value: object) -> str:
    """Return a value as JSON text."""
    return _encode(value).decode()
