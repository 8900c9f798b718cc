"""Creates the codecs of all formats; the library of a format is loaded with its first schema.

Function workers import this module, so it must stay light.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, Protocol

from headrace.config.format_list import FORMATS, Format
from headrace.errors import SchemaInvalid
from headrace.extras import not_installed
from headrace.formats import plain
from headrace.formats.plain import Convert, PythonCodec


def _plain_codec(row: Format) -> PythonCodec:
    module = plain if hasattr(plain, row.codec) else import_module(f"headrace.formats.{row.name}")
    codec: PythonCodec = getattr(module, row.codec)()
    return codec


PLAIN_CODECS: Final[Mapping[str, PythonCodec]] = {
    row.name: _plain_codec(row) for row in FORMATS.values() if not row.schema_type
}
"""The formats without a schema."""


class SchemaCodec(PythonCodec, Protocol):
    """A codec of one schema."""

    @property
    def decode_python(self) -> Convert: ...

    def decode_row(self, data: bytes) -> bytes:
        """Return a payload as JSON for columns of SQL; raises as `decode` does."""

    def require_writable(self) -> None:
        """Prepare to write; reading needs less.

        Raises:
            SchemaInvalid: Values cannot be written with this schema.
        """


def module_of(schema_type: str) -> tuple[Format, Any]:
    """Return the format of a type of schemas, and its module, which has a codec and `sql_type`.

    Raises:
        SchemaInvalid: No format has this type.
        EnvironmentProblem: The library of the format is not installed.
    """
    for row in FORMATS.values():
        if row.schema_type == schema_type:
            break
    else:
        raise SchemaInvalid(f"the schema has the type {schema_type}, which is not supported")
    try:
        return row, import_module(f"headrace.formats.{row.name}")
    except ImportError as cause:
        raise not_installed(f"a schema of type {schema_type} is in use, and it", str(cause.name), row.name) from cause


def encodes_python(format_name: str) -> bool:
    """Return whether the codec of a format with a schema takes Python values, not only JSON text; raises as above."""
    row, module = module_of(FORMATS[format_name].schema_type)
    return hasattr(getattr(module, row.codec), "encode_python")


def compile_schema(
    schema_type: str,
    text: str,
    references: Mapping[str, str],
    message: str | None = None,
    *,
    plain_unions: bool = False,
) -> SchemaCodec:
    """Return the codec of a schema; keep it, because compiling takes milliseconds.

    Args:
        schema_type: The registry's name for the type, as in the list of formats.
        references: Texts of the referenced schemas by name, each after those that it refers to itself.
        message: Of a Protobuf schema: full name of the message type to write; None for the first.
        plain_unions: Of an Avro schema: whether values of unions are in JSON without the branch's name.

    Raises:
        SchemaInvalid: No such type, or the text is not a valid schema.
        EnvironmentProblem: The library of the format is not installed.
    """
    row, module = module_of(schema_type)
    codec: SchemaCodec = getattr(module, row.codec)(text, references, message=message, plain_unions=plain_unions)
    return codec
