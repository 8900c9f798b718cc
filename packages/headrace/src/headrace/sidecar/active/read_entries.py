"""Records as the JSON entries of a read.

A record that cannot be decoded becomes an entry with its coordinates, its raw bytes and the error. So it does not block
the records behind it.
"""

import base64
from collections.abc import Mapping, Sequence

from headrace.errors import DecodeError
from headrace.formats.choice import Codecs, Reader
from headrace.formats.stored_values import StoredValues
from headrace.records import Record, RecordBatch, TopicPartition
from headrace.sidecar.record_json import RecordTexts, exact_headers, quote, write_records


class EntryWriter:
    """Writes the entries of one instance's reads; without a group, those of reads by offset."""

    def __init__(self, group: str, keys: Reader, values: Reader) -> None:
        self.needs_schemas = keys.names_schemas or values.names_schemas
        """Whether `load` must come before `write`, because keys or values have a format of the registry."""
        self._group = group
        self._keys = keys
        self._values = values

    async def load(self, batches: Sequence[RecordBatch]) -> None:
        """Wait for what `write` needs: the schemas that records name.

        Raises:
            RegistryUnavailable: One is not cached, and the registry does not respond.
        """
        for batch in batches:
            await self._keys.prepare(batch.keys)
            await self._values.prepare(batch.values)

    def write(
        self, batches: Sequence[RecordBatch], assignments: Mapping[TopicPartition, str] | None = None
    ) -> list[RecordTexts]:
        """Return one entry per record, with the assignment of its partition."""
        entries: list[RecordTexts] = []
        for batch in batches:
            entries += self._write_batch(batch, assignments[batch.topic_partition] if assignments else "")
        return entries

    def _write_batch(self, records: RecordBatch, assignment: str) -> list[RecordTexts]:
        try:
            keys = self._keys.texts(records.keys)
            values = self._values.texts(records.values)
        except DecodeError:
            if len(records) > 1:
                singles = [self._write_batch(records[at : at + 1], assignment) for at in range(len(records))]
                return [entry for entries in singles for entry in entries]
            return [RecordTexts(b",%b", [[self._undecodable(records[0], assignment).encode()]])]
        return [write_records(self._group, records.topic_partition, records, keys, values, assignment=assignment)]

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


class FoundEntries:
    """Writes entries whose keys and values are as they are found, with the format of each."""

    def __init__(self, codecs: Codecs) -> None:
        self._stored = StoredValues(codecs)

    async def load(self, batches: Sequence[RecordBatch]) -> None:
        """Wait for the schemas that records name; one that is not there is left out."""
        for batch in batches:
            await self._stored.prepare([*batch.keys, *batch.values])

    def write(self, batches: Sequence[RecordBatch]) -> list[RecordTexts]:
        """Return one entry per record."""
        find = self._stored.find
        entries: list[RecordTexts] = []
        for batch in batches:
            keys, values = [*map(find, batch.keys)], [*map(find, batch.values)]
            texts = [each.text for each in keys], [each.text for each in values]
            form, columns = write_records("", batch.topic_partition, batch, *texts)
            form = form[:-1] + b',"keyFormat":"%b","valueFormat":"%b"}'
            formats = [[each.format.encode() for each in column] for column in (keys, values)]
            entries.append(RecordTexts(form, [*columns, *formats]))
        return entries
