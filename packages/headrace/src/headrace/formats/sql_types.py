"""The columns of a registered schema in SQL, as in `CREATE TABLE`."""

from collections.abc import Iterable, Mapping
from typing import NoReturn

from headrace.errors import SchemaInvalid
from headrace.formats.schema_codec import module_of


def sql_names(text: str) -> dict[str, str]:
    """Return the types of SQL by a format's names for them: `INT int; STRING string uuid`."""
    parts = (part.split() for part in text.split("; "))
    return {name: kind for kind, *names in parts for name in names}


def sql_columns(schema_type: str, text: str, references: Mapping[str, str]) -> str:
    """Return the columns of a schema: `carrier STRING, arr_delay DOUBLE`.

    Raises:
        SchemaInvalid: The text is not a valid schema, or a part of it has no type in SQL.
    """
    found: str = module_of(schema_type)[1].sql_type(text, references)
    if not found.startswith("STRUCT<"):
        refuse("$", "a type without fields")
    return found.removeprefix("STRUCT<").removesuffix(">")


def row_type(fields: Iterable[tuple[str, str]]) -> str:
    """Return the type of a row by the names and types of its fields."""
    return f"STRUCT<{', '.join(f'`{name}`: {kind}' for name, kind in fields)}>"


def refuse(path: str, what: str) -> NoReturn:
    """Raise SchemaInvalid for a part of a schema."""
    raise SchemaInvalid(f"{path} of the schema is {what}, which has no type in SQL")
