"""`headrace dlq`: list, show, redrive."""

import contextlib
from typing import Any

import click

from headrace.cli.connection import Place, kafka_options, open_producer
from headrace.cli.output import counted, print_json, print_rows, progress
from headrace.control.dead_letters import dead_letter_topics, letters, summary
from headrace.control.redrive import Redrive, Redriven, RedriveOptions
from headrace.delivery.dead_letter import Origin, own_headers
from headrace.errors import InvalidRequest
from headrace.kafka import Admin
from headrace.lifecycle import SystemClock
from headrace.records import Record


@click.group()
def dlq() -> None:
    """Dead letters: how many are left and why, one by one, and back to where they came from.

    Example: headrace dlq redrive orders.dlq --dry-run
    """


@dlq.command("list")
@click.argument("topic", required=False)
@kafka_options
async def list_(topic: str | None, place: Place, output: str) -> None:
    """Say per dead letter topic how many letters there are, how many are not redriven yet, and their error classes.

    Looks at topics named *.dlq, and with -c at those the file names.

    Example: headrace dlq list
    """
    admin = Admin(place.kafka)
    consumers = place.file.reactive_consumers.values() if place.file else ()
    configured = {c.dead_letter.topic_for(origin) for c in consumers for origin in c.topics}
    found = []
    for name in [topic] if topic else await dead_letter_topics(admin, configured):
        try:
            found.append(await summary(place.kafka, admin, name))
        except InvalidRequest:
            if topic:
                raise  # else it is named like one, but holds other records
    print_rows([numbers._asdict() for numbers in found], output, "no dead letter topics")


@dlq.command()
@click.argument("topic")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@click.option("--offset", type=click.IntRange(0), help="From this offset on; needs --partition.")
@click.option("--max", "limit", type=click.IntRange(1), default=10, show_default=True, help="Letters at most.")
@kafka_options
async def show(topic: str, partition: int | None, offset: int | None, limit: int, place: Place, output: str) -> None:
    """Show letters: where each came from, what went wrong, its key and value.

    Example: headrace dlq show orders.dlq --partition 0 --offset 17 --max 1
    """
    if offset is not None and partition is None:
        raise click.UsageError("--offset needs --partition: offsets count within a partition")
    found: list[dict[str, Any]] = []
    async with contextlib.aclosing(letters(place.kafka, Admin(place.kafka), topic, partition, offset)) as reader:
        async for record, origin in reader:
            found.append(_shown(record, origin))
            if len(found) == limit:
                break
    if output == "json":
        print_json(found)
    elif not found:
        click.echo("no dead letters")
    for letter in found if output == "text" else ():
        click.echo("\n".join(f"{name:14} {value}" for name, value in letter.items()) + "\n")


@dlq.command()
@click.argument("topic")
@click.option("--dry-run", is_flag=True, help="Say what would go where; send nothing.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Letters per second at most.")
@click.option("--from-beginning", is_flag=True, help="Also letters that were redriven before.")
@click.option("--skip-foreign", is_flag=True, help="Pass over records that are no dead letters.")
@kafka_options
async def redrive(topic: str, place: Place, output: str, rate: float | None, **chosen: bool) -> None:
    """Send letters back to the partitions they came from, with the key, value and headers they had.

    Interrupt it at any time: the next redrive goes on behind the last letter that is acknowledged. Letters that arrive
    meanwhile wait for the next redrive. Every group that reads the origin's topic gets the records again.

    Example: headrace dlq redrive orders.dlq --rate 100
    """
    options = RedriveOptions(rate_records=rate, **chosen)
    with progress(f"redrive {topic}") as show_progress:
        async with open_producer(place.kafka) as back:
            work = Redrive(place.kafka, Admin(place.kafka), topic, back.produce, SystemClock())
            done = await work.run(options, show_progress)
    if output == "json":
        print_json({"topic": topic, "dry_run": options.dry_run, **done._asdict()})
    else:
        click.echo(_sentence(topic, done, options.dry_run))


def _shown(record: Record, origin: Origin) -> dict[str, Any]:
    return {
        "letter": f"{record.topic_partition} offset {record.offset}",
        "origin": f"{origin.partition} offset {origin.offset}",
        "group": origin.group,
        "attempts": origin.attempts,
        "first failure": origin.first_failure,
        "last failure": origin.last_failure,
        "error": origin.error,
        "reason": origin.reason,
        "key": _text(record.key),
        "value": _text(record.value),
        "headers": {name: _text(value) for name, value in own_headers(record.headers)},
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="backslashreplace")


def _sentence(topic: str, done: Redriven, dry_run: bool) -> str:
    if not done.records:
        text = f"nothing left to redrive in {topic}"
    else:
        verb = "would go back" if dry_run else "back and acknowledged"
        targets = ", ".join(f"{count} to {target}" for target, count in sorted(done.targets.items()))
        text = f"{counted(done.records, 'letter')} of {topic} {verb}: {targets}"
    return text + (f"; {counted(done.foreign, 'record')} passed over: no dead letter" if done.foreign else "")
