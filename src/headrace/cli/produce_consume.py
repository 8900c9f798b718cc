"""`headrace produce` and `headrace consume`: write lines of text as records, and print records as lines."""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import IO, Any

import click
import msgspec

from headrace.cli.cluster_options import ClusterSettings, connection_options, open_producer, registry_option
from headrace.cli.options import AliasedOption, with_options
from headrace.cli.output import counted, print_result, progress
from headrace.config.format_list import FORMATS, STRINGS
from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import DecodeError, EncodeError, HeadraceError, InvalidRequest
from headrace.formats.choice import Codecs, Reader, SchemaChoice
from headrace.formats.plain import JsonCodec
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin, Reachability, read_records, read_window, window
from headrace.queries.engine_process import require_duckdb
from headrace.records import OutgoingRecord, Record
from headrace.runtime import SystemClock, run_blocking

_CHUNK_BYTES = 1_048_576
MAX_LINE_BYTES = 16_777_216
_FORMAT = click.Choice([*FORMATS])
_format_options = with_options(
    click.option(
        "--value-format",
        "--format",
        "value_format",
        cls=AliasedOption,
        type=_FORMAT,
        default="string",
        show_default=True,
    ),
    click.option("--key-format", type=_FORMAT, default="string", show_default=True),
)

Encode = Callable[[bytes], bytes]
"""Encodes the text of a key or value. Raises HeadraceError if the text does not fit the format."""


@click.command()
@click.argument("topic")
@click.option("--file", type=click.File("rb"), default="-", help="Read this file instead of standard input.")
@click.option("--keys", is_flag=True, help="Each line is key, tab, value.")
@_format_options
@connection_options
@registry_option
async def produce(
    topic: str, file: IO[bytes], keys: bool, value_format: str, key_format: str, cluster: ClusterSettings, output: str
) -> None:
    """Write each line as a record, and print how many all in-sync replicas have acknowledged.

    Empty lines are skipped. Lines are string text, JSON, base64 (binary), or JSON for the newest schema of the subject
    TOPIC-value.

    Example: printf 'a\\t{"n": 1}\\n' | headrace produce orders --keys --value-format json
    """
    acknowledged = lines_before = 0
    try:
        await Admin(cluster.kafka).describe_topic(topic)
        async with open_codecs(cluster.registry) as codecs:
            encode_key = await encoder(codecs, key_format, f"{topic}-key") if keys else None
            encode_value = await encoder(codecs, value_format, f"{topic}-value")
        with progress(f"produce to {topic}") as show:
            async with open_producer(cluster.kafka) as target:
                async for lines in read_lines(file):
                    records, problem = encode_lines(topic, lines, lines_before, encode_key, encode_value)
                    lines_before += len(lines)
                    results = await target.produce(records)
                    failed = [result for result in results if isinstance(result, HeadraceError)]
                    acknowledged += len(results) - len(failed)
                    show(acknowledged, None)
                    if stop := failed[0] if failed else problem:
                        raise stop
    except BaseException:
        click.echo(f"stopped after {counted(acknowledged, 'record')} acknowledged in {topic}:", err=True)
        raise
    text = f"{counted(acknowledged, 'record')} acknowledged in {topic}"
    print_result({"topic": topic, "acknowledged": acknowledged}, text, output)


async def encoder(codecs: Codecs, name: str, subject: str) -> Encode:
    """Return the function that encodes texts in a format, with the newest schema of the subject if it needs one."""
    codec = (await codecs.for_writing(SchemaChoice(name), name, subject)).codec
    is_text = name in STRINGS

    def encode(text: bytes) -> bytes:
        try:
            json_text = msgspec.json.encode(text.decode()) if is_text else JsonCodec().decode(text)
        except UnicodeDecodeError as cause:
            raise EncodeError("not UTF-8 text") from cause
        return codec.encode(json_text)

    return encode


def encode_lines(
    topic: str, lines: Sequence[bytes], lines_before: int, encode_key: Encode | None, encode_value: Encode
) -> tuple[list[OutgoingRecord], HeadraceError | None]:
    """Return the records up to the first invalid line, and the error of that line."""
    records: list[OutgoingRecord] = []
    for number, line in enumerate(lines, lines_before + 1):
        if not line:
            continue
        key, tab, value = line.partition(b"\t") if encode_key else (b"", b"\t", line)
        try:
            if not tab:
                raise InvalidRequest("--keys requires a tab between key and value")
            records.append(OutgoingRecord(topic, encode_key(key) if encode_key else None, encode_value(value)))
        except HeadraceError as cause:
            text = f"line {number}: {cause}. This line and later ones were not sent"
            return records, InvalidRequest(text, line=number)
    return records, None


async def read_lines(file: IO[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the available lines without waiting for more, so that lines of a slow pipe are sent at once."""
    rest = b""
    while data := await run_blocking(file.read1, _CHUNK_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidRequest(f"a line is longer than {MAX_LINE_BYTES} bytes: the input must be lines of text")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        await asyncio.sleep(0)
    if rest:
        yield [rest]


class _StartChoice(click.Choice[str]):
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
    type=_StartChoice(["beginning", "end"]),
    default="beginning",
    show_default=True,
)
@click.option("--max", "limit", type=click.IntRange(1), help="Stop after this number of records.")
@click.option("--follow", is_flag=True, help="Wait for new records; --from end implies it.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@_format_options
@click.option("--where", metavar="CONDITION", help="Only records that meet this condition in SQL.")
@click.option("--keys", is_flag=True, help='Print key, tab, value; no key is null, the text null is "null".')
@connection_options
@registry_option
async def consume(
    topic: str,
    start: str,
    limit: int | None,
    follow: bool,
    partition: int | None,
    where: str | None,
    cluster: ClusterSettings,
    **shown: Any,
) -> None:
    """Print the records of a topic, one per line; with --output json as objects with partition, offset and headers.

    The order is that of each partition. Binary values are printed as base64, values with a schema as JSON.

    CONDITION is over key, value, partition, offset, timestamp and headers, in DuckDB's SQL: "value.amount > 100" for
    a field of JSON or of a value with a schema, "key = 'k1'", "value LIKE '%late%'". --max counts what is printed.

    Example: headrace consume orders --value-format json --max 10
    """
    seen = 0
    as_json = shown["output"] == "json"
    starts, ends = await window(Admin(cluster.kafka), topic, partition)
    if start == "end":
        reading = read_records(cluster.kafka, ends)
    else:
        reading = read_records(cluster.kafka, starts) if follow else read_window(cluster.kafka, starts, ends)
    async with (
        open_codecs(cluster.registry) as codecs,
        contextlib.aclosing(reading) as batches,
        _reporting_outages(cluster) if follow or start == "end" else contextlib.nullcontext(),
    ):
        keys = codecs.for_reading(shown["key_format"]) if shown["keys"] or as_json else None
        values = codecs.for_reading(shown["value_format"])
        matching = _filter(where, codecs, shown["key_format"], shown["value_format"]) if where else _all
        async for batch in batches:
            records = (await matching(batch))[: None if limit is None else limit - seen]
            if keys:
                await keys.prepare(record.key for record in records)
            await values.prepare(record.value for record in records)
            sys.stdout.writelines(_line(record, keys, values, as_json) for record in records)
            sys.stdout.flush()
            seen += len(records)
            if seen == limit:
                return
    if not seen:
        click.echo(f"no records in {topic}{' meet the condition' if where else ''}", err=True)


async def _all(records: list[Record]) -> list[Record]:
    return records


def _filter(
    where: str, codecs: Codecs, key_format: str, value_format: str
) -> Callable[[list[Record]], Awaitable[list[Record]]]:
    require_duckdb()
    from headrace.queries.record_filter import RecordFilter

    return RecordFilter(where, codecs, key_format, value_format).matching


@contextlib.asynccontextmanager
async def _reporting_outages(cluster: ClusterSettings) -> AsyncGenerator[None, None]:
    """Report on standard error when Kafka becomes unreachable, and when it responds again."""
    reachability = Reachability(cluster.kafka, SystemClock(), report=functools.partial(click.echo, err=True))
    await reachability.start()
    try:
        yield
    finally:
        await reachability.stop()


def _line(record: Record, keys: Reader | None, values: Reader, as_json: bool) -> str:
    try:
        key = keys.decode(record.key) if keys else None
        value = values.decode(record.value)
    except DecodeError as cause:
        raise DecodeError(
            f"record {record.offset} of {record.topic_partition}: {cause}. "
            "Choose another --value-format or --key-format"
        ) from cause
    if not as_json:
        return (f"{json_to_line(key)}\t" if keys else "") + json_to_line(value) + "\n"
    found = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": msgspec.Raw(key or b"null"),
        "value": msgspec.Raw(value or b"null"),
        "headers": [[name, data and data.decode(errors="backslashreplace")] for name, data in record.headers],
    }
    return msgspec.json.encode(found).decode() + "\n"


@contextlib.asynccontextmanager
async def open_codecs(registry: SchemaRegistryConfig) -> AsyncIterator[Codecs]:
    """Provide the codecs for a command; only formats with a schema use the registry."""
    client = SchemaRegistry(registry, SystemClock())
    try:
        yield Codecs(client, plain_unions=registry.avro_unions == "plain")
    finally:
        await client.close()


def json_to_line(text: bytes | None) -> str:
    """Return the text of a JSON string without its quotes, any other JSON value unchanged, `null` for no value.

    A string that would look like `null` keeps its quotes.
    """
    if text is None:
        return "null"
    plain = msgspec.json.decode(text, type=str) if text[:1] == b'"' else text.decode()
    return text.decode() if plain.strip('\\"') == "null" else plain
