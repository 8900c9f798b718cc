"""`headrace consume`: reads a topic without a group, so it disturbs nobody and commits nothing."""

import contextlib
import functools
import sys
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import click
import msgspec

from headrace.cli.connection import Place, kafka_options, registry_option
from headrace.cli.selection_options import AliasedOption
from headrace.cli.text import FORMATS, json_to_line, open_codecs, value_format_option
from headrace.control.topics import read_window, window
from headrace.errors import DecodeError
from headrace.formats.codecs import Reader
from headrace.kafka import Admin, Reachability, read_records
from headrace.lifecycle import SystemClock
from headrace.records import Record


class _Wanted(NamedTuple):
    """What the options ask for."""

    topic: str
    start: str
    limit: int | None
    follow: bool
    partition: int | None
    value_format: str
    key_format: str
    keys: bool
    output: str


class _Start(click.Choice[str]):
    """`beginning` or `end`; also `begin`, as in `reactive seek`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert("beginning" if value == "begin" else value, param, ctx)


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "--since",
    "start",
    cls=AliasedOption,
    type=_Start(["beginning", "end"]),
    default="beginning",
    show_default=True,
)
@click.option("--max", "limit", type=click.IntRange(1), help="Stop after so many records.")
@click.option("--follow", is_flag=True, help="Wait for new records; --from end implies it.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@value_format_option
@click.option("--key-format", type=click.Choice(FORMATS), default="string", show_default=True)
@click.option("--keys", is_flag=True, help='Print key, tab, value; no key is null, the text null is "null".')
@kafka_options
@registry_option
async def consume(place: Place, **options: Any) -> None:
    """Print the records of a topic, one per line; with --output json as objects with partition, offset and headers.

    Order holds within a partition. Binary values are printed as base64, those with a schema as JSON.

    Example: headrace consume orders --value-format json --max 10
    """
    wanted, seen = _Wanted(**options), 0
    async with (
        open_codecs(place.registry) as codecs,
        contextlib.aclosing(await _batches(place, wanted)) as batches,
        _outages_told(place) if wanted.follow or wanted.start == "end" else contextlib.nullcontext(),
    ):
        keys, values = codecs.for_reading(wanted.key_format), codecs.for_reading(wanted.value_format)
        async for batch in batches:
            records = batch[: None if wanted.limit is None else wanted.limit - seen]
            await keys.prepare(record.key for record in records)
            await values.prepare(record.value for record in records)
            sys.stdout.writelines(_line(record, wanted, keys, values) for record in records)
            sys.stdout.flush()
            seen += len(records)
            if seen == wanted.limit:
                return
    if not seen:
        click.echo(f"no records in {wanted.topic}", err=True)


@contextlib.asynccontextmanager
async def _outages_told(place: Place) -> AsyncGenerator[None, None]:
    """Say on standard error when Kafka does not answer any more, and when it does again."""
    reachability = Reachability(place.kafka, SystemClock(), tell=functools.partial(click.echo, err=True))
    await reachability.start()
    try:
        yield
    finally:
        await reachability.stop()


async def _batches(place: Place, wanted: _Wanted) -> AsyncGenerator[list[Record], None]:
    starts, ends = await window(Admin(place.kafka), wanted.topic, wanted.partition)
    if wanted.start == "end":
        return read_records(place.kafka, ends)
    return read_records(place.kafka, starts) if wanted.follow else read_window(place.kafka, starts, ends)


def _line(record: Record, wanted: _Wanted, keys: Reader, values: Reader) -> str:
    try:
        key = keys.decode(record.key) if wanted.keys or wanted.output == "json" else None
        value = values.decode(record.value)
    except DecodeError as cause:
        raise DecodeError(
            f"record {record.offset} of {record.topic_partition}: {cause}. "
            "Choose another --value-format or --key-format"
        ) from cause
    if wanted.output == "json":
        return _as_object(record, key, value) + "\n"
    return (f"{json_to_line(key)}\t" if wanted.keys else "") + json_to_line(value) + "\n"


def _as_object(record: Record, key: bytes | None, value: bytes | None) -> str:
    return msgspec.json.encode(
        {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            "key": msgspec.Raw(key or b"null"),
            "value": msgspec.Raw(value or b"null"),
            "headers": [[name, data and data.decode(errors="backslashreplace")] for name, data in record.headers],
        }
    ).decode()
