"""`headrace consume`: read topics and print their records."""

import contextlib
import functools
import gc
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import click

from headrace.cli.client_options import property_option, with_properties
from headrace.cli.cluster_options import ClusterSettings, connection_options
from headrace.cli.command_codecs import open_codecs
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.log_positions import (
    PARTITIONS,
    POSITION,
    LogBounds,
    LogPosition,
    check_pattern,
    chosen_partitions,
    find_topics,
)
from headrace.cli.options import with_options
from headrace.cli.output import progress
from headrace.cli.record_output import TOKENS, JsonLines, RecordRenderer, ShownBatch, Template
from headrace.config.format_list import FORMATS
from headrace.errors import DecodeError
from headrace.extras import hook
from headrace.formats.choice import Codecs
from headrace.formats.stored_values import AUTO, Shown, StoredValues
from headrace.kafka import Admin, MemberReader, Reachability, ReadPart, read_columns
from headrace.records import Offsets, RecordBatch, TopicPartition
from headrace.runtime import SystemClock

_MOST_RECORDS: Final = 10_000
_COLLECT_AFTER: Final = (50_000, 20, 20)
"""A collection in the middle of a part finds nothing."""
_FORMAT: Final = click.Choice([AUTO, *FORMATS])
_PROPERTIES: Final = {"queued.max.messages.kbytes": 65_536}


_which = with_options(
    click.option(
        "-o",
        "--from",
        "--since",
        "start",
        type=POSITION,
        default="earliest",
        help="earliest, latest, 47, +2 (after the first two), -3 (the last three), 2026-01-31T08:00, 2h (ago), @MS.",
    ),
    click.option("--to", "stop", type=POSITION, help="Stop before this position; by default the end of now."),
    click.option("--follow", is_flag=True, help="Wait for new records; --from latest implies it."),
    click.option("-p", "--partition", "partitions", type=PARTITIONS, help="Only these partitions, such as 0 or 0,2."),
    click.option("-n", "--max", "limit", type=click.IntRange(1), help="Stop after this number of records."),
    click.option("-g", "--group", "-G", "group", help="Read as a member of this group, and commit what was printed."),
    click.option("--where", metavar="CONDITION", help="Only records that meet this condition in SQL."),
)
_how = with_options(
    click.option("--value-format", "--format", "value_format", type=_FORMAT, default=AUTO, show_default=True),
    click.option("--key-format", type=_FORMAT, default=AUTO, show_default=True),
    click.option("--keys", is_flag=True, help='Print key, tab, value; no key is null, the text null is "null".'),
    click.option("--times", is_flag=True, help="Print the timestamp first."),
    click.option("-f", "--template", help=f"Print by a format string, with \\n and \\t: {TOKENS}."),
)


@click.command(cls=HeadraceCommand)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@_which
@_how
@property_option
@functools.partial(connection_options, registry=True)
async def consume(topics: Sequence[str], cluster: ClusterSettings, properties: Any, **given: Any) -> None:
    """Print the records of topics, one per line; with --output json as objects with metadata.

    TOPIC is a name, or a pattern such as '^orders[.]'. It stops at the end that the topics have now.
    The order is that of each partition. Values that name a schema are printed as JSON, others as text; on a terminal
    control characters are escaped.

    CONDITION is over key, value, partition, offset, timestamp and headers, in DuckDB's SQL: "value.amount > 100" for
    a field of JSON or of a value with a schema, "key = 'k1'", "value LIKE '%late%'". --max counts what is printed.

    Example: headrace consume orders --from -10 --keys
    """
    run = _Run(topics, with_properties(cluster, properties), **given)
    run.check()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    await run.print_records()


class Printer:
    """Selects, decodes and renders records, and counts them."""

    def __init__(
        self,
        sides: tuple[StoredValues | None, StoredValues | None],
        renderer: RecordRenderer,
        condition: Any,
        limit: int | None,
    ) -> None:
        """Print at most `limit` records; `sides` decode keys and values, as far as they are needed.

        Args:
            condition: A `RecordFilter` of headrace-queries; None for every record.
        """
        self._keys, self._values = sides
        self._renderer = renderer
        self._condition = condition
        self._limit = limit
        self.printed = 0
        self.read = 0
        """Records that were read, whether they were printed or not."""
        self.next_offsets: dict[TopicPartition, int] = {}
        """After the last record of each partition that was printed or left out; the caller clears it."""

    @property
    def is_complete(self) -> bool:
        return self.printed == self._limit

    async def render(self, part: ReadPart) -> bytes:
        """Return what is printed for records.

        Raises:
            DecodeError: A key or value is not of the format that was chosen.
        """
        found = []
        for batch in part.batches:
            if not self.is_complete:
                found.append(await self._render(batch, batch.topic_partition in part.append_times))
        return b"".join(found)

    async def _render(self, batch: RecordBatch, has_append_times: bool) -> bytes:
        chosen = await _meeting(self._condition, batch) if self._condition else batch
        if self._limit is not None:
            chosen = chosen[: self._limit - self.printed]
        keys, values = await _shown(self._keys, chosen, "keys"), await _shown(self._values, chosen, "values")
        self.printed += len(chosen)
        self.read += len(batch)
        last = chosen.offsets if self.is_complete else batch.offsets
        self.next_offsets[batch.topic_partition] = last[-1] + 1
        return self._renderer(ShownBatch(chosen, keys, values, has_append_times)) if len(chosen) else b""


async def _meeting(condition: Any, batch: RecordBatch) -> RecordBatch:
    offsets = {record.offset for record in await condition.matching([*batch])}
    return batch.select([at for at, offset in enumerate(batch.offsets) if offset in offsets])


async def _shown(side: StoredValues | None, batch: RecordBatch, column: str) -> list[Shown] | bytes | None:
    if side is None:
        return None
    payloads = getattr(batch, column)
    if (text := side.text_of(payloads)) is not None:
        return text
    await side.prepare(payloads)
    with contextlib.suppress(DecodeError):
        return side.shown(payloads)
    return [_shown_alone(side, data, batch, offset) for data, offset in zip(payloads, batch.offsets, strict=True)]


def _shown_alone(side: StoredValues, data: bytes | None, batch: RecordBatch, offset: int) -> Shown:
    try:
        return side.shown([data])[0]
    except DecodeError as cause:
        where = f"record {offset} of {batch.topic_partition}"
        raise DecodeError(f"{where}: {cause}. Choose another --value-format or --key-format") from cause


def _file_progress(doing: str) -> contextlib.AbstractContextManager[Callable[[int, int | None], None]]:
    """Show a progress bar on a terminal while records are written elsewhere."""
    return contextlib.nullcontext(lambda done, total: None) if sys.stdout.isatty() else progress(doing)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


class _Run(NamedTuple):
    """One run of the command: its options."""

    topics: Sequence[str]
    cluster: ClusterSettings
    start: LogPosition
    stop: LogPosition | None
    follow: bool
    partitions: frozenset[int] | None
    limit: int | None
    group: str | None
    where: str | None
    value_format: str
    key_format: str
    keys: bool
    times: bool
    template: str | None
    output: str

    @property
    def isolation(self) -> str:
        """Whether records of open and aborted transactions are left out."""
        return str(self.cluster.kafka.properties.get("isolation.level", "read_committed"))

    @property
    def follows(self) -> bool:
        """Whether it waits for new records."""
        return self.follow or self.start.kind == "latest"

    def check(self) -> None:
        """Raise click.UsageError if options contradict each other, EnvironmentProblem if a library is missing."""
        if self.where:
            hook("record_filter", "headrace consume --where")
        for topic in self.topics:
            check_pattern(topic)
        problems = {
            "--to ends the reading, and --follow or --from latest does not: leave one out": self.stop and self.follows,
            "--group reads on where the group has committed: of --from it takes earliest and latest": self.group
            and self.start.kind not in ("earliest", "latest"),
            "--group gets its partitions from the group: leave out --partition and --to": self.group
            and (self.partitions or self.stop),
            "-f has its own tokens: leave out --keys, --times and --output json": self.template
            and (self.keys or self.times or self.output == "json"),
        }
        for problem, found in problems.items():
            if found:
                raise click.UsageError(problem)

    def renderer(self) -> RecordRenderer:
        """Return what writes the records.

        Raises:
            click.UsageError: The template is not valid.
        """
        terminal = sys.stdout.isatty()
        if self.template is not None:
            try:
                return Template(self.template, terminal=terminal)
            except ValueError as cause:
                raise click.UsageError(f"-f: {cause}") from None
        if self.output == "json":
            return JsonLines(terminal=terminal)
        columns = [token for token, chosen in (("%D", self.times), ("%k", self.keys), ("%s", True)) if chosen]
        return Template("\t".join(columns) + "\n", terminal=terminal, exact=False)

    async def print_records(self) -> None:
        renderer = self.renderer()
        topics, span = await self._find()
        async with open_codecs(self.cluster.registry) as codecs:
            printer = self.printer(codecs, renderer)
            if span is None:
                await self._read_as_member(printer, topics)
                return
            name = ", ".join(topics[:3]) + (", ..." if len(topics) > 3 else "")
            starts, ends = span
            total = None if ends is None else sum(max(0, end - starts[p]) for p, end in ends.items())
            properties = {**_PROPERTIES, "isolation.level": self.isolation}
            reading = read_columns(self.cluster.kafka, starts, ends, properties, _MOST_RECORDS)
            with _file_progress(f"consume {name}") as show:
                async with contextlib.aclosing(reading) as parts, self._reporting_outages():
                    async for part in parts:
                        _write(await printer.render(part))
                        show(printer.read, total)
                        if printer.is_complete:
                            return
        if not printer.printed:
            click.echo(f"no such records in {name}", err=True)

    async def _find(self) -> tuple[list[str], tuple[Offsets, Offsets | None] | None]:
        """Return the topics, and where to start and where to end; None for a member of a group, which Kafka tells.

        The client of these requests ends here: nothing replaces it when credentials change while topics are followed.
        """
        admin = Admin(self.cluster.kafka)
        found = await find_topics(admin, self.topics)
        topics = [topic.name for topic in found]
        if self.group:
            return topics, None
        bounds = await LogBounds.of(admin, chosen_partitions(found, self.partitions or ()), self.isolation)
        ends = None if self.follows else await bounds.at(admin, self.stop) if self.stop else bounds.ends
        return topics, (await bounds.at(admin, self.start), ends)

    async def _read_as_member(self, printer: Printer, topics: Sequence[str]) -> None:
        properties = {"isolation.level": self.isolation}
        otherwise: Literal["earliest", "latest"] = "latest" if self.start.kind == "latest" else "earliest"
        reader = MemberReader(self.cluster.kafka, self.group or "", topics, properties, otherwise=otherwise)
        text = f"reading as a member of group {self.group}, which commits what was printed: at least once"
        click.echo(text, err=True)
        async with self._reporting_outages(), reader, contextlib.aclosing(reader.parts(_MOST_RECORDS)) as parts:
            async for part in parts:
                _write(await printer.render(part))
                if printer.next_offsets and (problem := await reader.commit(printer.next_offsets)):
                    click.echo(f"not committed, so these records may be read again: {problem}", err=True)
                printer.next_offsets.clear()
                if printer.is_complete or (reader.is_at_end and not self.follows):
                    break
        if not printer.printed:
            click.echo(f"no records for this member of group {self.group}", err=True)

    def printer(self, codecs: Codecs, renderer: RecordRenderer) -> Printer:
        """Return what selects, decodes and renders records."""
        report = functools.partial(click.echo, err=True)
        sides = tuple(StoredValues(codecs, name, report=report) for name in (self.key_format, self.value_format))
        condition = None
        if self.where:
            record_filter = hook("record_filter", "headrace consume --where")
            condition = record_filter(self.where, codecs, self.key_format, self.value_format, report)
        chosen = (sides[0] if renderer.needs_keys else None, sides[1] if renderer.needs_values else None)
        return Printer(chosen, renderer, condition, self.limit)

    @contextlib.asynccontextmanager
    async def _reporting_outages(self) -> AsyncGenerator[None, None]:
        """Report on standard error when Kafka becomes unreachable, and when it responds again."""
        if not self.follows:
            yield
            return
        echo = functools.partial(click.echo, err=True)
        reachability = Reachability(self.cluster.kafka, SystemClock(), report=echo)
        await reachability.start()
        try:
            yield
        finally:
            await reachability.stop()
