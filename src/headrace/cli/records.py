"""`headrace produce` and `headrace consume`: lines of text become records, and records lines of text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import IO, Any, NamedTuple, get_args

import click
import msgspec

from headrace.cli.connection import ClusterSettings, kafka_options, open_producer, registry_option
from headrace.cli.options import AliasedOption
from headrace.cli.output import counted, print_json, progress
from headrace.config.kafka import SchemaRegistryConfig
from headrace.config.section import FormatName
from headrace.control.topics import read_window, window
from headrace.errors import DecodeError, EncodeError, HeadraceError, InvalidRequest
from headrace.formats.codec import Codec, JsonCodec
from headrace.formats.codecs import Codecs, Reader, SchemaChoice
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin, Reachability, read_records
from headrace.lifecycle import SystemClock, run_blocking
from headrace.records import OutgoingRecord, Record

_CHUNK_BYTES = 1_048_576
MAX_LINE_BYTES = 16_777_216
FORMATS = get_args(FormatName)


def _format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    value = click.option(
        "--value-format",
        "--format",
        "value_format",
        cls=AliasedOption,
        type=click.Choice(FORMATS),
        default="string",
        show_default=True,
    )
    key = click.option("--key-format", type=click.Choice(FORMATS), default="string", show_default=True)
    return value(key(command))


class ProduceOptions(NamedTuple):
    """Options of `headrace produce`."""

    topic: str
    file: IO[bytes]
    keys: bool
    value_format: str
    key_format: str
    output: str


@click.command()
@click.argument("topic")
@click.option("--file", type=click.File("rb"), default="-", help="Read this file instead of standard input.")
@click.option("--keys", is_flag=True, help="Each line is key, tab, value.")
@_format_options
@kafka_options
@registry_option
async def produce(cluster: ClusterSettings, **given: Any) -> None:
    """Write each line as a record, and say how many are acknowledged by all in-sync replicas.

    Empty lines are passed over. Lines are string text, JSON, base64 (binary), or JSON for the newest schema of the
    subject TOPIC-value (avro, jsonschema, protobuf).

    Example: printf 'a\\t{"n": 1}\\n' | headrace produce orders --keys --value-format json
    """
    options, acknowledged, lines_before = ProduceOptions(**given), 0, 0
    try:
        await Admin(cluster.kafka).describe_topic(options.topic)
        async with open_codecs(cluster.registry) as codecs:
            key_codec = await codec_for(codecs, options.key_format, f"{options.topic}-key") if options.keys else None
            value_codec = await codec_for(codecs, options.value_format, f"{options.topic}-value")
        with progress(f"produce to {options.topic}") as show:
            async with open_producer(cluster.kafka) as target:
                async for lines in read_lines(options.file):
                    records, problem = encode_lines(lines, lines_before, options, (key_codec, value_codec))
                    lines_before += len(lines)
                    results = await target.produce(records)
                    failed = [result for result in results if isinstance(result, HeadraceError)]
                    acknowledged += len(results) - len(failed)
                    show(acknowledged, None)
                    if stop := failed[0] if failed else problem:
                        raise stop
    except BaseException:
        done = counted(acknowledged, "record")
        click.echo(f"{done} acknowledged in {options.topic}, then it stopped:", err=True)
        raise
    if options.output == "json":
        print_json({"topic": options.topic, "acknowledged": acknowledged})
    else:
        click.echo(f"{counted(acknowledged, 'record')} acknowledged in {options.topic}")


async def codec_for(codecs: Codecs, name: str, subject: str) -> Codec:
    """Return the codec that writes a format, with the newest schema of the subject if it needs one."""
    return (await codecs.for_writing(SchemaChoice(name), name, subject)).codec


def encode_lines(
    lines: Sequence[bytes], lines_before: int, options: ProduceOptions, codecs: tuple[Codec | None, Codec]
) -> tuple[list[OutgoingRecord], HeadraceError | None]:
    """Return the records up to the first line that cannot be one, and what is wrong with that line."""
    key_codec, value_codec = codecs
    records: list[OutgoingRecord] = []
    for number, line in enumerate(lines, lines_before + 1):
        if not line:
            continue
        key, tab, value = line.partition(b"\t") if key_codec else (b"", b"\t", line)
        try:
            if not tab:
                raise InvalidRequest("has no tab between key and value, as --keys demands")
            key_bytes = key_codec.encode(line_to_json(key, options.key_format)) if key_codec else None
            value_bytes = value_codec.encode(line_to_json(value, options.value_format))
        except HeadraceError as cause:
            text = f"line {number}: {cause}. Nothing of this line and after it was sent"
            return records, InvalidRequest(text, line=number)
        records.append(OutgoingRecord(options.topic, key_bytes, value_bytes))
    return records, None


async def read_lines(file: IO[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the available lines without waiting for more, so that a slow pipe is produced as it arrives."""
    rest = b""
    while data := await run_blocking(file.read1, _CHUNK_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidRequest(f"a line is longer than {MAX_LINE_BYTES} bytes: this is no file of lines")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        await asyncio.sleep(0)
    if rest:
        yield [rest]


class _ConsumeOptions(NamedTuple):
    """Options of `headrace consume`."""

    topic: str
    start: str
    limit: int | None
    follow: bool
    partition: int | None
    value_format: str
    key_format: str
    keys: bool
    output: str


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
@click.option("--max", "limit", type=click.IntRange(1), help="Stop after so many records.")
@click.option("--follow", is_flag=True, help="Wait for new records; --from end implies it.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@_format_options
@click.option("--keys", is_flag=True, help='Print key, tab, value; no key is null, the text null is "null".')
@kafka_options
@registry_option
async def consume(cluster: ClusterSettings, **given: Any) -> None:
    """Print the records of a topic, one per line; with --output json as objects with partition, offset and headers.

    Order holds within a partition. Binary values are printed as base64, those with a schema as JSON.

    Example: headrace consume orders --value-format json --max 10
    """
    options, seen = _ConsumeOptions(**given), 0
    async with (
        open_codecs(cluster.registry) as codecs,
        contextlib.aclosing(await _batches(cluster, options)) as batches,
        _reporting_outages(cluster) if options.follow or options.start == "end" else contextlib.nullcontext(),
    ):
        keys, values = codecs.for_reading(options.key_format), codecs.for_reading(options.value_format)
        async for batch in batches:
            records = batch[: None if options.limit is None else options.limit - seen]
            await keys.prepare(record.key for record in records)
            await values.prepare(record.value for record in records)
            sys.stdout.writelines(_line(record, options, keys, values) for record in records)
            sys.stdout.flush()
            seen += len(records)
            if seen == options.limit:
                return
    if not seen:
        click.echo(f"no records in {options.topic}", err=True)


@contextlib.asynccontextmanager
async def _reporting_outages(cluster: ClusterSettings) -> AsyncGenerator[None, None]:
    """Report on standard error when Kafka stops to answer, and when it answers again."""
    reachability = Reachability(cluster.kafka, SystemClock(), report=functools.partial(click.echo, err=True))
    await reachability.start()
    try:
        yield
    finally:
        await reachability.stop()


async def _batches(cluster: ClusterSettings, options: _ConsumeOptions) -> AsyncGenerator[list[Record], None]:
    starts, ends = await window(Admin(cluster.kafka), options.topic, options.partition)
    if options.start == "end":
        return read_records(cluster.kafka, ends)
    return read_records(cluster.kafka, starts) if options.follow else read_window(cluster.kafka, starts, ends)


def _line(record: Record, options: _ConsumeOptions, keys: Reader, values: Reader) -> str:
    try:
        key = keys.decode(record.key) if options.keys or options.output == "json" else None
        value = values.decode(record.value)
    except DecodeError as cause:
        raise DecodeError(
            f"record {record.offset} of {record.topic_partition}: {cause}. "
            "Choose another --value-format or --key-format"
        ) from cause
    if options.output == "json":
        return _as_object(record, key, value) + "\n"
    return (f"{json_to_line(key)}\t" if options.keys else "") + json_to_line(value) + "\n"


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


@contextlib.asynccontextmanager
async def open_codecs(registry: SchemaRegistryConfig) -> AsyncIterator[Codecs]:
    """Give the codecs for the length of a command; only formats with a schema use the registry."""
    client = SchemaRegistry(registry, SystemClock())
    try:
        yield Codecs(client, plain_unions=registry.avro_unions == "plain")
    finally:
        await client.close()


def line_to_json(line: bytes, format_name: str) -> bytes:
    """Return a line as the JSON text that the format's codec takes.

    Raises:
        EncodeError: The line does not fit the format.
    """
    try:
        if format_name in ("string", "binary"):
            return msgspec.json.encode(line.decode())
        return JsonCodec().decode(line)
    except (UnicodeDecodeError, DecodeError) as cause:
        raise EncodeError(str(cause) if isinstance(cause, DecodeError) else "not UTF-8 text") from cause


def json_to_line(text: bytes | None) -> str:
    """Return the text of a JSON string without its quotes, any other JSON value as it is, `null` for no value.

    A string that would read as `null` keeps its quotes, to differ from no value.
    """
    if text is None:
        return "null"
    plain = msgspec.json.decode(text, type=str) if text[:1] == b'"' else text.decode()
    return text.decode() if plain.strip('\\"') == "null" else plain
