"""`headrace produce`: write lines, JSON objects or files as records."""

import functools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import IO, Any, Final, NamedTuple

import click

from headrace.cli.client_options import producer_of, property_option
from headrace.cli.cluster_options import ClusterSettings, connection_options, open_producer
from headrace.cli.command_codecs import open_codecs
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.options import MOMENT, PAIR, ParsedType, with_options
from headrace.cli.output import counted, print_result, progress
from headrace.cli.record_input import Encoding, RecordFields, encode_lines, of_line, of_object, read_lines
from headrace.cli.record_output import unescaped
from headrace.config.format_list import FORMATS, SCHEMA_TYPES
from headrace.errors import HeadraceError
from headrace.formats.choice import SchemaChoice
from headrace.kafka import Admin, Producer
from headrace.kafka.timestamps import milliseconds
from headrace.records import OutgoingRecord
from headrace.runs.selection import to_bytes

_FORMAT: Final = click.Choice([*FORMATS])
_WITH_SCHEMA: Final = " or ".join(", ".join(SCHEMA_TYPES).rsplit(", ", 1))
Make = Callable[[RecordFields, bytes], OutgoingRecord | None]
_KINDS: Final[dict[str, Make]] = {"lines": of_line, "ndjson": of_object}


def _delimiter(text: str) -> str:
    if not (found := unescaped(text)):
        raise ValueError
    return found


_DELIMITER: Final = ParsedType("text", _delimiter, "no text between records: write characters, \\n, \\t, \\0 or \\xHH")
_what = with_options(
    click.option(
        "--input",
        "kind",
        type=click.Choice([*_KINDS]),
        default="lines",
        show_default=True,
        help="Lines, or JSON objects with key, value, headers, partition and timestamp.",
    ),
    click.option("-D", "--separator", type=_DELIMITER, default="\\n", show_default=True, help="Between records."),
    click.option("--keys", is_flag=True, help="Each line is key, separator, value."),
    click.option(
        "-K", "--key-separator", type=_DELIMITER, help="Between key and value, by default a tab; means --keys."
    ),
    click.option("-k", "--key", help="The key of each record that has none of its own."),
    click.option("-H", "--header", "headers", type=PAIR, multiple=True, help="A header of each record."),
    click.option("-p", "--partition", type=click.IntRange(0), help="Partition of each record; by default by the key."),
    click.option("--timestamp", type=MOMENT, help="Of each record: 2026-01-31T08:00, or 2h (ago)."),
    click.option("-Z", "--tombstone", "tombstones", is_flag=True, help="An empty value, or a key alone, is null."),
)
_how = with_options(
    click.option("--value-format", "--format", "value_format", type=_FORMAT, help="By default text."),
    click.option("--key-format", type=_FORMAT, help="By default text."),
    click.option("--schema-file", type=click.File("r"), help="Schema of values; registered if it is new."),
    click.option("--schema-id", type=click.IntRange(1), help="Schema of values by its id."),
)


@click.command(cls=HeadraceCommand)
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.File("rb"))
@_what
@_how
@property_option
@functools.partial(connection_options, registry=True)
async def produce(topic: str, cluster: ClusterSettings, output: str, properties: Any, **given: Any) -> None:
    """Write each line as a record, and print how many all in-sync replicas have acknowledged.

    It reads FILES, or standard input. Empty lines are skipped. Lines are string text, JSON, base64 (binary), or JSON
    for the newest schema of the subject TOPIC-value.

    Example: printf 'a\\t{"n": 1}\\n' | headrace produce orders --keys --value-format json
    """
    source = _Source.of(given)
    settings = producer_of(cluster, properties)
    acknowledged = 0
    try:
        await Admin(cluster.kafka).describe_topic(topic)
        fields = await _fields(topic, cluster, given)
        with progress(f"produce to {topic}") as show:
            async with open_producer(cluster.kafka, settings) as target:
                async for records, problem in source.records(fields):
                    sent, stop = await _send(target, records)
                    acknowledged += sent
                    stop = stop or problem
                    show(acknowledged, None)
                    if stop:
                        raise stop
    except BaseException:
        click.echo(f"stopped after {counted(acknowledged, 'record')} acknowledged in {topic}:", err=True)
        raise
    text = f"{counted(acknowledged, 'record')} acknowledged in {topic}"
    print_result({"topic": topic, "acknowledged": acknowledged}, text, output)


async def _fields(topic: str, cluster: ClusterSettings, given: dict[str, Any]) -> RecordFields:
    """Return what the options say of each record; a schema is fetched once."""
    text = given["schema_file"].read() if given["schema_file"] else None
    has_keys = given["keys"] or given["key_separator"] is not None
    async with open_codecs(cluster.registry) as codecs:
        keys = await Encoding.find(codecs, given["key_format"], f"{topic}-key", SchemaChoice())
        schema = SchemaChoice(text=text, id=given["schema_id"])
        values = await Encoding.find(codecs, given["value_format"], f"{topic}-value", schema)
    return RecordFields(
        topic,
        values,
        keys,
        None if given["key"] is None else keys.of_text(to_bytes(given["key"])),
        to_bytes(given["key_separator"] or "\t") if has_keys else None,
        [(name, to_bytes(value)) for name, value in given["headers"]],
        given["partition"],
        milliseconds(given["timestamp"]) if given["timestamp"] else 0,
        given["tombstones"],
    )


class _Source(NamedTuple):
    """The input."""

    files: Sequence[IO[bytes]]
    kind: str
    separator: bytes

    @classmethod
    def of(cls, given: dict[str, Any]) -> "_Source":
        """Take the options.

        Raises:
            click.UsageError: They contradict each other.
        """
        kind, has_keys = given["kind"], given["keys"] or given["key_separator"] is not None
        separators = given["separator"] != "\n" or given["key_separator"] is not None
        problems = {
            "--key is the key of every record, and --keys reads one from each: leave one out": given["key"] is not None
            and has_keys,
            f"--separator and --key-separator are of --input lines: leave them out of {kind}": separators
            and kind != "lines",
            f"--keys is of --input lines: leave it out of {kind}": has_keys and kind != "lines",
            "--schema-file and --schema-id name two schemas: leave one out": given["schema_file"]
            and given["schema_id"],
            f"--schema-file needs --value-format {_WITH_SCHEMA}": given["schema_file"] and not given["value_format"],
        }
        for problem, found in problems.items():
            if found:
                raise click.UsageError(problem)
        return cls(given["files"] or [sys.stdin.buffer], kind, to_bytes(given["separator"]))

    async def records(self, fields: RecordFields) -> AsyncIterator[tuple[list[OutgoingRecord], HeadraceError | None]]:
        """Yield records as they arrive, up to the first invalid line, and the error of that one."""
        before = 0
        for file in self.files:
            async for lines in read_lines(file, self.separator):
                yield encode_lines(fields, _KINDS[self.kind], lines, before)
                before += len(lines)


async def _send(target: Producer, records: Sequence[OutgoingRecord]) -> tuple[int, HeadraceError | None]:
    """Send records and wait until they are acknowledged; return how many are, and the first error."""
    results = await target.produce(records) if records else []
    failed = [result for result in results if isinstance(result, HeadraceError)]
    return len(results) - len(failed), failed[0] if failed else None
