"""Records as JSON texts in the shape of the light-4j kafka-sidecar's consumer record, for deliveries and for reads.

Source: light-4j kafka-sidecar, `/consumers` (the fields of a record).
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import msgspec

from headrace.delivery.dead_letter import REDRIVE_OF
from headrace.delivery.outcomes import Delivery
from headrace.records import CORRELATION_ID, Header, RecordBatch, TopicPartition

_MOST_RESPONSE_BYTES: Final = 8_388_608
_encode = msgspec.json.Encoder().encode


class RecordTexts(NamedTuple):
    """The JSON objects of records, as a form and the columns that go into it. So they are written in one step."""

    form: bytes
    """One object, behind a comma."""
    columns: Sequence[Sequence[Any]]

    def texts(self) -> Iterator[bytes]:
        """Return each object as a text of its own."""
        form = self.form[1:]
        return (form % row for row in zip(*self.columns, strict=True))


def delivery_id(delivery: Delivery, offset: int | str, headers: Sequence[Header]) -> str:
    """Return the id of a record's deliveries, which is the same in every attempt and after a redrive."""
    position = next((data for name, data in headers if name == REDRIVE_OF and data), None) if headers else None
    topic, partition = delivery.partition
    where = position.decode(errors="replace") if position else f"{topic}:{partition}:{offset}"
    return f"{delivery.group}:{where}"


def write_records(
    group: str,
    partition: TopicPartition,
    records: RecordBatch,
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    *,
    assignment: str = "",
    delivery: Delivery | None = None,
) -> RecordTexts:
    """Return the JSON objects of records; `keys` and `values` are JSON texts, of which None is left out.

    A record without a correlation id gets its id as one.

    Args:
        group: Begins the ids; they have none if it is empty.
        partition: Where the records are, as clients shall see it.
        assignment: The name of the partition's assignment, for records of a read.
        delivery: Adds the id, attempt and epoch of a delivery.
    """
    topic, number = partition
    # All ids of a partition begin with the same characters.
    identity = quote(f"{group}:{topic}:{number}:" if group else f"{topic}:{number}:")[:-1]
    own = f'{_fixed(identity)}%d"'
    ids: Sequence[Any] = records.offsets
    form = f',{{"topic":{_fixed(quote(topic))},"partition":{number},"offset":%d'
    form += f',"assignment":"{assignment}","timestamp":%d' if assignment else ',"timestamp":%d'
    columns: list[Sequence[Any]] = [records.offsets, records.timestamps_ms]
    if records.headers:
        headers, ids = _own_texts(records, records.headers, identity, delivery)
        own = "%b"
        form += ',"headers":%b'
        columns.append(headers)
    else:
        form += f',"headers":{{"{CORRELATION_ID}":{own}}}'
        columns.append(ids)
    for name, texts in (("key", keys), ("value", values)):
        if all(texts):  # no text is empty
            form += f',"{name}":%b'
            columns.append(texts)
        elif any(texts):
            form += "%b"
            columns.append([b',"%b":%b' % (name.encode(), text) if text else b"" for text in texts])
    if delivery:
        epoch = f',"epoch":{delivery.epoch}' if delivery.epoch else ""
        replay = f',"replay":{_fixed(quote(delivery.replay))}' if delivery.replay else ""
        form += f',"deliveryId":{own},"attempt":{delivery.attempt}{epoch}{replay}'
        columns.append(ids)
    return RecordTexts(form.encode() + b"}", columns)


def _own_texts(
    records: RecordBatch, all_headers: Sequence[Sequence[Header] | None], identity: str, delivery: Delivery | None
) -> tuple[list[bytes], list[bytes]]:
    """Return the headers of each record, and its id, as JSON texts."""
    texts, ids = [], []
    for offset, headers in zip(records.offsets, all_headers, strict=True):
        own = f'{identity}{offset}"'
        if not headers:
            text = f'{{"{CORRELATION_ID}":{own}}}'
        else:
            if delivery and REDRIVE_OF in dict(headers):
                own = quote(delivery_id(delivery, offset, headers))
            text = exact_headers(headers, own)
        texts.append(text.encode())
        ids.append(own.encode())
    return texts, ids


def join_array(parts: Sequence[RecordTexts], start: bytes = b"[", end: bytes = b"]") -> bytes:
    """Return the objects of records as a JSON array between `start` and `end`, which have no `%`."""
    forms = b"".join([part.form * len(part.columns[0]) for part in parts])
    rows = chain.from_iterable(zip(*part.columns, strict=True) for part in parts)
    return b"%b%b%b" % (start, forms[1:], end) % tuple(chain.from_iterable(rows))


def fitting(entries: Sequence[RecordTexts], start: bytes = b"[") -> tuple[bytes, int]:
    """Return the first entries that fit into a response, at least one, as an array without its end; and how many."""
    text = join_array(entries, start, b"")
    if len(text) <= _MOST_RESPONSE_BYTES:
        return text, sum([len(each.columns[0]) for each in entries])
    texts = [one for each in entries for one in each.texts()]
    sizes = accumulate([len(one) + 1 for one in texts])
    count = max(1, bisect(list(sizes), _MOST_RESPONSE_BYTES))
    return start + b",".join(texts[:count]), count


def _fixed(text: str) -> str:
    """Return text for a form, without conversions."""
    return text.replace("%", "%%")


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
