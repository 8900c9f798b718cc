"""The codecs of a command."""

import contextlib
from collections.abc import AsyncIterator

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.runtime import SystemClock


@contextlib.asynccontextmanager
async def open_codecs(registry: SchemaRegistryConfig) -> AsyncIterator[Codecs]:
    """Provide the codecs for a command; only formats with a schema use the registry."""
    client = SchemaRegistry(registry, SystemClock())
    try:
        yield Codecs(client, plain_unions=registry.avro_unions == "plain")
    finally:
        await client.close()
