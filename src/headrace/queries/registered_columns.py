"""The columns of a topic that the schema registry has."""

from headrace.formats.registry import SchemaRegistry
from headrace.formats.sql_types import sql_columns
from headrace.queries.columns import Column, of_fields


async def registered_columns(
    registry: SchemaRegistry, topic: str, *, max_age_seconds: float | None = None
) -> list[Column]:
    """Return the columns of the newest schema of `<topic>-value`; see `SchemaRegistry.of_subject`.

    Raises:
        FormatError: The registry does not have it, or a part of it has no type in SQL.
        ConfigError: A table cannot have such columns.
        RegistryUnavailable: The registry does not respond.
    """
    found = await registry.of_subject(f"{topic}-value", max_age_seconds=max_age_seconds)
    texts = await registry.texts_of(found.references)
    return of_fields(sql_columns(found.type, found.text, texts))
