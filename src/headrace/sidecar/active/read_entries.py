"""Records as the JSON entries of a read.

A record that cannot be decoded becomes an entry with its coordinates, its raw bytes and the error. So it does not block
the records behind it.
"""

import base64
import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from headrace.errors import DecodeError
from headrace.formats.choice import Reader
from headrace.records import Record, TopicPartition
from headrace.sidecar.active.buffer import runs_of
from headrace.sidecar.record_json import PARTS, exact_headers, quote, write_records

_MOST_RESPONSE_BYTES: Final = 8_388_608
_NONE: Final[Mapping[TopicPartition, str]] = {}


class EntryWriter:
    """Writes the entries of one instance's reads; without a group, those of reads by offset."""

    def __init__(self, group: str, keys: Reader, values: Reader) -> None:
        self._group = group
        self._keys = keys
        self._values = values

    async def write(self, records: Sequence[Record], assignments: Mapping[TopicPartition, str] = _NONE) -> list[bytes]:
        """Return the parts of one entry per record, with the assignment of its partition, as `write_records` does.

        Raises:
            RegistryUnavailable: A schema that they name is not cached, and the registry does not respond.
        """
        await self._keys.prepare(record.key for record in records)
        await self._values.prepare(record.value for record in records)
        entries: list[bytes] = []
        for partition, run in runs_of(records):
            entries += self._write_run(partition, run, assignments[partition] if assignments else "")
        return entries

    def _write_run(self, partition: TopicPartition, records: Sequence[Record], assignment: str) -> list[bytes]:
        try:
            keys = self._keys.texts([record.key for record in records])
            values = self._values.texts([record.value for record in records])
        except DecodeError:
            if len(records) > 1:
                return [part for record in records for part in self._write_run(partition, [record], assignment)]
            return [b"," + self._undecodable(records[0], assignment).encode(), b"", b""]
        rows = zip(
            [str(record.offset) for record in records],
            [record.timestamp_ms for record in records],
            [record.read_headers() for record in records],
            keys,
            values,
            strict=True,
        )
        return write_records(self._group, partition, rows, assignment=assignment)

    def _undecodable(self, record: Record, assignment: str) -> str:
        """Return the entry of a record whose key or value cannot be decoded, or both; a good one is decoded."""
        entry: dict[str, object] = {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": record.timestamp_ms,
        }
        decoded = ""
        problems = []
        for name, reader, data in (("key", self._keys, record.key), ("value", self._values, record.value)):
            try:
                text = reader.texts([data])[0]
            except DecodeError as cause:
                entry[f"raw{name.title()}"] = base64.b64encode(data or b"").decode()
                entry["errorCode"] = cause.code
                problems.append(f"{name}: {cause.description}")
            else:
                decoded += "" if text is None else f',"{name}":{text.decode()}'
        entry["error"] = "; ".join(problems)
        if assignment:
            entry["assignment"] = assignment
        position = f"{record.topic}:{record.partition}:{record.offset}"
        own_id = quote(f"{self._group}:{position}" if self._group else position)
        return f'{quote(entry)[:-1]},"headers":{exact_headers(record.headers, own_id)}{decoded}}}'


def fitting(parts: list[bytes]) -> list[bytes]:
    """Return the parts of the first entries that fit into a response, at least one."""
    if sum(map(len, parts)) <= _MOST_RESPONSE_BYTES:
        return parts
    found = bisect.bisect(list(itertools.accumulate(map(len, parts))), _MOST_RESPONSE_BYTES)
    return parts[: PARTS * max(1, found // PARTS)]
