"""Keys and values between what people see (lines of text) and JSON text, which codecs take and give."""

import contextlib
from collections.abc import AsyncIterator
from typing import get_args

import click
import msgspec

from headrace.cli.selection_options import AliasedOption
from headrace.config.kafka import SchemaRegistryConfig
from headrace.config.section import FormatName
from headrace.errors import DecodeError, EncodeError
from headrace.formats.codec_json import JsonCodec
from headrace.formats.codecs import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.lifecycle import SystemClock

FORMATS = get_args(FormatName)


value_format_option = click.option(
    "--value-format",
    "--format",
    "value_format",
    cls=AliasedOption,
    type=click.Choice(FORMATS),
    default="string",
    show_default=True,
)


@contextlib.asynccontextmanager
async def open_codecs(registry: SchemaRegistryConfig) -> AsyncIterator[Codecs]:
    """Give the codecs for the length of a command; the registry is asked only for formats with a schema."""
    client = SchemaRegistry(registry, SystemClock())
    try:
        yield Codecs(client, plain_unions=registry.avro_unions == "plain")
    finally:
        await client.close()


def line_to_json(line: bytes, format_name: str) -> bytes:
    """Return a line as the JSON text that the format's codec takes.

    Raises:
        EncodeError: The line is not what the format needs.
    """
    try:
        if format_name in ("string", "binary"):
            return msgspec.json.encode(line.decode())
        return JsonCodec().decode(line)
    except (UnicodeDecodeError, DecodeError) as cause:
        raise EncodeError(str(cause) if isinstance(cause, DecodeError) else "not UTF-8 text") from cause


def json_to_line(text: bytes | None) -> str:
    """Return the text of a JSON string without its quotes, any other JSON value as it is, `null` for no value.

    A string that would read as `null` keeps its quotes, so that it can be told from no value.
    """
    if text is None:
        return "null"
    plain = msgspec.json.decode(text, type=str) if text[:1] == b'"' else text.decode()
    return text.decode() if plain.strip('\\"') == "null" else plain
