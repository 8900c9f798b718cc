"""Records as the JSON entries of a read, in the shape of the light-4j kafka-sidecar's consumer record.

A record that cannot be decoded becomes an entry with its coordinates, its raw bytes and the error. So it never blocks
the records behind it.
"""

import base64
import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from headrace.errors import DecodeError
from headrace.formats.choice import Reader
from headrace.records import CORRELATION_ID, Header, Record, TopicPartition
from headrace.sidecar.active.buffer import runs_of

_MOST_ANSWER_BYTES: Final = 8_388_608
_NONE: Final[Mapping[TopicPartition, str]] = {}
_encode = msgspec.json.Encoder().encode


class EntryWriter:
    """Writes the entries of one instance's reads, or without a group those of a read by offset."""

    def __init__(self, group: str, keys: Reader, values: Reader) -> None:
        self._prefix = f"{group}:" if group else ""
        self._keys = keys
        self._values = values

    async def write(self, records: Sequence[Record], assignments: Mapping[TopicPartition, str] = _NONE) -> list[str]:
        """Return one entry of JSON text per record, with the assignment of its partition.

        Raises:
            RegistryUnavailable: A schema that they name is not known here, and the registry does not answer.
        """
        await self._keys.prepare(record.key for record in records)
        await self._values.prepare(record.value for record in records)
        entries: list[str] = []
        for partition, run in runs_of(records):
            named = f',"assignment":"{assignments[partition]}"' if assignments else ""
            entries += self._write_run(*partition, run, named)
        return entries

    def _write_run(self, topic: str, partition: int, records: Sequence[Record], named: str) -> list[str]:
        try:
            keys = self._keys.texts([record.key for record in records])
            values = self._values.texts([record.value for record in records])
        except DecodeError:
            if len(records) > 1:
                return [entry for record in records for entry in self._write_run(topic, partition, [record], named)]
            return [self._undecodable(records[0], named)]
        middle = f'{named},"timestamp":'
        start = f'{{"topic":{_text(topic)},"partition":{partition},"offset":'
        # An id begins like all others of the partition; a record without headers has no other header.
        identity = _text(f"{self._prefix}{topic}:{partition}:")[:-1]
        only = f',"headers":{{"{CORRELATION_ID}":{identity}'
        entries = []
        for record, key, value in zip(records, keys, values, strict=True):
            offset, headers = record.offset, record.read_headers()
            head = f',"headers":{_headers_of(headers, f"{identity}{offset}")}' if headers else f'{only}{offset}"}}'
            key = "" if key is None else f',"key":{key}'
            value = "" if value is None else f',"value":{value}'
            entries.append(f"{start}{offset}{middle}{record.timestamp_ms}{head}{key}{value}}}")
        return entries

    def _undecodable(self, record: Record, named: str) -> str:
        """Return the entry of a record whose key or value, or both, cannot be decoded; the other one is decoded."""
        identity = _text(f"{self._prefix}{record.topic}:{record.partition}:{record.offset}")[:-1]
        entry: dict[str, object] = {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": record.timestamp_ms,
        }
        decoded, problems = "", []
        for name, reader, data in (("key", self._keys, record.key), ("value", self._values, record.value)):
            try:
                text = reader.texts([data])[0]
            except DecodeError as cause:
                entry[f"raw{name.title()}"] = base64.b64encode(data or b"").decode()
                entry["errorCode"] = cause.code
                problems.append(f"{name}: {cause.description}")
            else:
                decoded += "" if text is None else f',"{name}":{text}'
        entry["error"] = "; ".join(problems)
        return f'{_text(entry)[:-1]}{named},"headers":{_headers_of(record.headers, identity)}{decoded}}}'


def fitting(entries: list[str]) -> list[str]:
    """Return the first entries, as many as an answer may have and at least one."""
    return entries[: max(1, bisect.bisect(list(itertools.accumulate(map(len, entries))), _MOST_ANSWER_BYTES))]


def _headers_of(headers: Sequence[Header], identity: str) -> str:
    """Return headers as a JSON object, and where that cannot hold them exactly, also as a list.

    `identity` is the start of a JSON string: the correlation id of a record without one.
    """
    texts: dict[str, str | None] = {}
    exact = True
    for name, data in headers:
        text = None if data is None else data.decode(errors="replace")
        exact = exact and name not in texts and data is not None and "\ufffd" not in (text or "")
        texts[name] = text
    written = _text(texts)
    if CORRELATION_ID not in texts:
        written = f'{written[:-1]}{"," if texts else ""}"{CORRELATION_ID}":{identity}"}}'
    if exact:
        return written
    pairs = [{"name": name, "value": data} for name, data in headers]  # bytes are base64 in msgspec's JSON
    return f'{written},"headerList":{_text(pairs)}'


def _text(value: object) -> str:
    return _encode(value).decode()
