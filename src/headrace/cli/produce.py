"""`headrace produce`: lines of a file or of standard input become records."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import IO, Any, NamedTuple

import click

from headrace.cli.connection import Place, kafka_options, open_producer, registry_option
from headrace.cli.output import counted, print_json, progress
from headrace.cli.text import FORMATS, line_to_json, open_codecs, value_format_option
from headrace.errors import HeadraceError, InvalidRequest
from headrace.formats.codec import Codec
from headrace.formats.codecs import Codecs, SchemaChoice
from headrace.kafka import Admin
from headrace.lifecycle import run_blocking
from headrace.records import OutgoingRecord

_CHUNK_BYTES = 1_048_576
_MAX_LINE_BYTES = 16_777_216


class _Wanted(NamedTuple):
    """What the options ask for."""

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
@value_format_option
@click.option("--key-format", type=click.Choice(FORMATS), default="string", show_default=True)
@kafka_options
@registry_option
async def produce(place: Place, **options: Any) -> None:
    """Write each line as a record, and say how many are acknowledged by all in-sync replicas.

    Empty lines are passed over. Lines are string text, JSON, base64 (binary), or JSON for the newest schema of the
    subject TOPIC-value (avro, jsonschema, protobuf).

    Example: printf 'a\\t{"n": 1}\\n' | headrace produce orders --keys --value-format json
    """
    wanted, acknowledged, lines_before = _Wanted(**options), 0, 0
    try:
        await Admin(place.kafka).describe_topic(wanted.topic)
        async with open_codecs(place.registry) as codecs:
            key_codec = await _codec(codecs, wanted.key_format, f"{wanted.topic}-key") if wanted.keys else None
            value_codec = await _codec(codecs, wanted.value_format, f"{wanted.topic}-value")
        with progress(f"produce to {wanted.topic}") as show:
            async with open_producer(place.kafka) as target:
                async for lines in _chunks(wanted.file):
                    records, problem = _encode(lines, lines_before, wanted, (key_codec, value_codec))
                    lines_before += len(lines)
                    results = await target.produce(records)
                    failed = [result for result in results if isinstance(result, HeadraceError)]
                    acknowledged += len(results) - len(failed)
                    show(acknowledged, None)
                    if stop := failed[0] if failed else problem:
                        raise stop
    except BaseException:
        done = counted(acknowledged, "record")
        click.echo(f"{done} acknowledged in {wanted.topic}, then it stopped:", err=True)
        raise
    if wanted.output == "json":
        print_json({"topic": wanted.topic, "acknowledged": acknowledged})
    else:
        click.echo(f"{counted(acknowledged, 'record')} acknowledged in {wanted.topic}")


async def _codec(codecs: Codecs, name: str, subject: str) -> Codec:
    return (await codecs.for_writing(SchemaChoice(name), name, subject)).codec


def _encode(
    lines: Sequence[bytes], lines_before: int, wanted: _Wanted, codecs: tuple[Codec | None, Codec]
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
            key_bytes = key_codec.encode(line_to_json(key, wanted.key_format)) if key_codec else None
            value_bytes = value_codec.encode(line_to_json(value, wanted.value_format))
        except HeadraceError as cause:
            text = f"line {number}: {cause}. Nothing of this line and after it was sent"
            return records, InvalidRequest(text, line=number)
        records.append(OutgoingRecord(wanted.topic, key_bytes, value_bytes))
    return records, None


async def _chunks(file: IO[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the lines that are there, without waiting for more, so a slow pipe is produced as it comes."""
    rest = b""
    while data := await run_blocking(file.read1, _CHUNK_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise InvalidRequest(f"a line is longer than {_MAX_LINE_BYTES} bytes: this is no file of lines")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        await asyncio.sleep(0)
    if rest:
        yield [rest]
