"""The schemas that the records of a frame name."""

from collections.abc import Iterable

from headrace import errors
from headrace.config.format_list import SCHEMA_TYPES
from headrace.formats.registry import SchemaRegistry
from headrace.functions import protocol
from headrace.functions.triggers.trigger import Trigger
from headrace.records import RecordBatch

_MAGIC = 0


class FrameSchemas:
    """Reads each schema once from the registry, for the formats of one trigger."""

    def __init__(self, registry: SchemaRegistry, trigger: Trigger) -> None:
        self._registry = registry
        self._trigger = trigger
        self._known: dict[int, protocol.Schema] = {}

    async def of(self, records: RecordBatch) -> dict[int, protocol.Schema]:
        """Return the schemas that these records name and the registry has.

        Raises:
            DestinationUnavailable: The registry failed to return a schema.
        """
        ids: set[int] = set()
        if self._trigger.value_format in SCHEMA_TYPES:
            ids |= _schema_ids(records.values)
        if self._trigger.key_format in SCHEMA_TYPES:
            ids |= _schema_ids(records.keys)
        for schema_id in ids - self._known.keys():
            try:
                schema = await self._registry.by_id(schema_id)
                texts = await self._registry.texts_of(schema.references)
            except errors.SchemaNotFound:
                continue  # the worker finds no schema for the record, which becomes a dead letter
            except errors.HeadraceError as cause:
                text = f"schema {schema_id} cannot be read: {cause.description}"
                raise errors.DestinationUnavailable(text, schema_id=schema_id) from cause
            self._known[schema_id] = protocol.Schema(schema_id, schema.type, schema.text, texts)
        return {schema_id: self._known[schema_id] for schema_id in ids if schema_id in self._known}


def _schema_ids(framed: Iterable[bytes | None]) -> set[int]:
    """Return the ids in the registry's framing; the worker judges bytes without it."""
    heads = {data[:5] for data in framed if data}
    return {int.from_bytes(head[1:], "big") for head in heads if len(head) == 5 and head[0] == _MAGIC}
