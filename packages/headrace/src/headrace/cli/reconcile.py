"""`headrace reconcile`: what became of each record of a topic, from offsets, dead letters and the audit."""

import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from headrace.admin.health.account import FATES, Account, Evidence, account
from headrace.cli.cluster_options import ClusterSettings, kafka_options
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.options import MOMENT
from headrace.cli.output import counted, print_json, print_rows
from headrace.config.backend import RowsBackend
from headrace.config.consumers import RetryConfig
from headrace.config.model import HeadraceConfig
from headrace.config.spelling import hint
from headrace.config.whole_file import WholeFile
from headrace.delivery import offset_map
from headrace.delivery.dead_letter import origin_of
from headrace.delivery.retry_topics import delayed_of
from headrace.errors import HeadraceError
from headrace.functions.load import load_function
from headrace.kafka import Admin, read_window
from headrace.kafka.timestamps import milliseconds
from headrace.records import Record, TopicPartition

_MOST_NAMED: Final = 20
_MOST_OFFSETS: Final = 5_000_000
_SKIPPED: Final = ("skipped", "filtered", "discarded", "given up")
"""Beginnings of the reasons of records that are completed without a dead letter; 0.2 wrote `given up`."""
_DELIVERIES: Final = ("REACTIVE_CONSUMER", "STREAMING_CONSUMER")


class _CountedConsumer(NamedTuple):
    """The consumer whose records are counted."""

    name: str
    group: str
    dead_letters: str
    """Topic of its dead letters."""
    retry: RetryConfig
    filters: bool
    """Whether it completes records without a delivery, as a standing query does."""


class _Audited(NamedTuple):
    """What the audit has of one partition."""

    skipped: set[int]
    failed: set[int]
    delivered: list[tuple[int, int]]


@click.command(cls=HeadraceCommand)
@click.argument("topic")
@click.option("--consumer", required=True, help="A reactive consumer, or a trigger of a function: function.trigger.")
@click.option(
    "--from", "since", type=MOMENT, help="Records written at this time or later: 2026-01-31T08:00, or 2h (ago)."
)
@click.option("--to", "until", type=MOMENT, help="Records written before this time.")
@kafka_options
async def reconcile(topic: str, consumer: str, since: Any, until: Any, cluster: ClusterSettings, output: str) -> int:
    """Prove that each record of a window was delivered, dead-lettered, skipped, or is waiting.

    Sources: committed offsets and the acknowledged ones above them, origins of dead letters, retry topics, the audit.
    With `audit.records: summary` or `all`, each delivery needs its event; otherwise a committed offset is a delivery.
    Offsets that nothing accounts for are named, and the exit code is 1.

    Example: headrace reconcile orders --consumer billing --from 24h
    """
    config, admin = cluster.file or WholeFile(), Admin(cluster.kafka)
    reader = _reader_of(config, consumer, topic)
    partitions = list(await admin.topic_offsets(topic))
    firsts, ends = await admin.start_offsets(partitions), await admin.end_offsets(partitions)
    if since:
        firsts = {**ends, **await admin.offsets_since(partitions, milliseconds(since))}
    if until:
        ends |= await admin.offsets_since(partitions, milliseconds(until))
    firsts = {p: min(first, ends[p]) for p, first in firsts.items()}
    if sum(ends[p] - firsts[p] for p in partitions) > _MOST_OFFSETS:
        raise click.UsageError(f"the window has more than {_MOST_OFFSETS:,} offsets: narrow it with --from and --to")
    # Offsets are read before dead letters and the audit, so what is completed meanwhile counts as waiting.
    commits = await admin.commits(reader.group)
    records = await _times(admin, firsts, ends)
    evidence = await _evidence(admin, config, reader, records, commits)
    accounts = {p: account(evidence[p]) for p in sorted(partitions)}
    rows = [_row(p, firsts[p], ends[p], found) for p, found in accounts.items()]
    missing = [f"{p}@{offset}: {why}" for p, found in accounts.items() for offset, why in found.unaccounted.items()]
    if output == "json":
        print_json(
            {"topic": topic, "consumer": reader.name, "group": reader.group, "partitions": rows, "unaccounted": missing}
        )
    else:
        print_rows(rows, output, "no partitions")
        _print_sum([*accounts.values()], missing, any(one.audited_since is not None for one in evidence.values()))
    return int(bool(missing))


def _reader_of(config: HeadraceConfig, name: str, topic: str) -> _CountedConsumer:
    readers: dict[str, _CountedConsumer] = {}
    for known, one in config.reactive_consumers.items():
        readers[known] = _CountedConsumer(
            known, one.group, one.dead_letter.topic_for(topic), one.retry, isinstance(one.backend, RowsBackend)
        )
    for function in (load_function(file, config) for file in config.functions):
        for trigger in function.kafka_triggers:
            known, dead_letters = f"{function.name}.{trigger.name}", trigger.dead_letters.topic_for(topic)
            readers[known] = _CountedConsumer(known, trigger.kafka.group, dead_letters, trigger.retry, False)
    if name not in readers:
        text = f"consumer {name[:60]!r} is not in the file: {hint(name, sorted(readers))}"
        raise click.UsageError(f"{text}. A registered consumer needs a file with its settings under this name")
    return readers[name]


async def _times(
    admin: Admin, firsts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, dict[int, int]]:
    found: dict[TopicPartition, dict[int, int]] = {partition: {} for partition in firsts}
    async for record in _read(admin, firsts, ends):
        found[record.topic_partition][record.offset] = record.timestamp_ms
    return found


async def _read(
    admin: Admin, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> AsyncIterator[Record]:
    async with contextlib.aclosing(read_window(admin.config, starts, ends)) as batches:
        async for batch in batches:
            for record in batch:
                yield record


async def _all_of(admin: Admin, topic: str, since_ms: int = 0) -> AsyncIterator[Record]:
    """Yield the records of a topic that were written at a time or later; none if it does not exist."""
    if not await admin.has_topic(topic):
        return
    partitions = list(await admin.topic_offsets(topic))
    firsts, ends = await admin.start_offsets(partitions), await admin.end_offsets(partitions)
    if since_ms:
        firsts = {**ends, **await admin.offsets_since(partitions, since_ms)}
    async for record in _read(admin, {p: min(firsts[p], ends[p]) for p in partitions}, ends):
        yield record


async def _evidence(
    admin: Admin,
    config: HeadraceConfig,
    reader: _CountedConsumer,
    records: Mapping[TopicPartition, Mapping[int, int]],
    commits: Mapping[TopicPartition, tuple[int, str]],
) -> dict[TopicPartition, Evidence]:
    first_ms = min((time for times in records.values() for time in times.values()), default=0)
    dead: dict[TopicPartition, dict[int, int]] = defaultdict(dict)
    async for record in _all_of(admin, reader.dead_letters):
        origin = origin_of(record.headers)
        if origin and origin.group == reader.group:
            dead[origin.partition][origin.offset] = origin.timestamp_ms
    retrying = await _retrying(admin, reader)
    audited, since = await _audit_of(admin, config, reader, first_ms)
    found = {}
    for partition, times in records.items():
        committed, text = commits.get(partition, (0, ""))
        acknowledged = offset_map.decode(text, committed) if text else None
        of_audit = audited[partition]
        found[partition] = Evidence(
            times, committed, acknowledged, dead[partition], retrying[partition], *of_audit, audited_since=since
        )
    return found


async def _retrying(admin: Admin, reader: _CountedConsumer) -> dict[TopicPartition, dict[int, int]]:
    found: dict[TopicPartition, dict[int, int]] = defaultdict(dict)
    topics = reader.retry.topic_names(reader.group)
    commits = await admin.commits(f"{reader.group}.retry") if topics else {}
    for topic in topics:
        async for record in _all_of(admin, topic):
            committed, text = commits.get(record.topic_partition, (0, ""))
            acknowledged = offset_map.decode(text, committed) if text else None
            if record.offset >= committed and not (acknowledged and acknowledged.has(record.offset)):
                origin = delayed_of(record).origin
                found[origin.topic_partition][origin.offset] = origin.timestamp_ms
    return found


async def _audit_of(
    admin: Admin, config: HeadraceConfig, reader: _CountedConsumer, first_ms: int
) -> tuple[dict[TopicPartition, _Audited], int | None]:
    """Return what the audit has of the consumer, and since when it has each delivery; None if it has not."""
    found: dict[TopicPartition, _Audited] = defaultdict(lambda: _Audited(set(), set(), []))
    earliest: int | None = None

    def take(text: bytes) -> None:
        nonlocal earliest
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # not an event of Headrace
            event = json.loads(text)
            earliest = min(event["timestamp"], event["timestamp"] if earliest is None else earliest)
            if event["auditType"] in _DELIVERIES and event.get("group") == reader.group and not event.get("replay"):
                _take_event(event, found)

    if config.audit.to == "topic":
        async for record in _all_of(admin, config.audit.topic, first_ms):
            take(record.value or b"")
    elif config.audit.to == "file":
        for line in _lines(config.audit.file):
            take(line)
    has_deliveries = config.audit.records in ("summary", "all") and not reader.filters
    return found, earliest if has_deliveries else None


def _take_event(event: Mapping[str, Any], found: Mapping[TopicPartition, _Audited]) -> None:
    for one in event.get("ranges") or [event]:
        of_partition, offset = found[TopicPartition(one["topic"], one["partition"])], one["offset"]
        if event["auditStatus"] == "SUCCESS":
            of_partition.delivered.append((offset, one.get("lastOffset") or offset))
        elif str(event.get("reason", "")).startswith(_SKIPPED):
            of_partition.skipped.add(offset)
        else:
            of_partition.failed.add(offset)


def _lines(file: Path) -> Iterator[bytes]:
    for path in sorted(file.parent.glob(f"{file.name}*"), reverse=True):  # rotated files have a number
        try:
            with path.open("rb") as lines:
                yield from lines
        except OSError as cause:
            raise HeadraceError(f"failed to read the audit {path}: {cause.strerror}") from cause


def _row(partition: TopicPartition, first: int, end: int, found: Account) -> dict[str, Any]:
    numbers: dict[str, Any] = {fate: found.counts[fate] for fate in FATES}
    unaccounted = {"unaccounted": len(found.unaccounted), "no record": end - first - found.records}
    return {"partition": str(partition), "from": first, "to": end, "records": found.records, **numbers, **unaccounted}


def _print_sum(accounts: Sequence[Account], missing: Sequence[str], has_deliveries: bool) -> None:
    total = sum(one.records for one in accounts)
    parts = [f"{sum(one.counts[fate] for one in accounts)} {fate}" for fate in FATES]
    click.echo(f"{counted(total, 'record')} = {' + '.join(parts)} + {len(missing)} unaccounted")
    if by_commit := sum(one.by_commit for one in accounts):
        why = "are older than the audit" if has_deliveries else "have no event, because of audit.records"
        click.echo(f"{by_commit} of the delivered ones {why}: only the committed offset shows their delivery")
    for text in missing[:_MOST_NAMED]:
        click.echo(text)
    if len(missing) > _MOST_NAMED:
        click.echo(f"and {len(missing) - _MOST_NAMED} more: --output json names all")
