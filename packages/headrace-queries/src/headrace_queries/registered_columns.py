"""The columns of a topic that the schema registry has."""

from headrace.formats.registry import SchemaRegistry
from headrace.formats.sql_types import sql_columns
from headrace_queries.columns import Column, of_fields


async def registered_columns(registry: SchemaRegistry, topic: str) -> list[Column]:
    """Return the columns of the schema of `<topic>-value` that is the newest now.

    Raises:
        FormatError: The registry does not have it, or a part of it has no type in SQL.
        ConfigError: A table cannot have such columns.
        RegistryUnavailable: The registry does not respond.
    """
    found = await registry.of_subject(f"{topic}-value", max_age_seconds=0)
    texts = await registry.texts_of(found.references)
    return of_fields(sql_columns(found.type, found.text, texts))
