"""`headrace reactive`: see reactive consumers and functions while they run, and steer them, over the HTTP API."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from headrace.cli.api import Api, api_options, part
from headrace.cli.output import counted, print_json, print_rows
from headrace.cli.reactive_top import top
from headrace.cli.registrations import register, registrations, remove
from headrace.cli.selection_options import Moment

_CONSUMERS = "/adm/reactive-consumers"
_COLUMNS = 100
_NAMED = 5
_DONE = ("sought", "skipped", "will be skipped", "ended already")


@click.group()
def reactive() -> None:
    """See and steer reactive consumers and functions while they run.

    What is asked of one process holds in every process of its deployment, over rebalances and restarts.

    Example: headrace reactive status orders
    """


for _command in (top, register, registrations, remove):
    reactive.add_command(_command)


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name partitions; it gets `where`."""

    @functools.wraps(command)
    def run(topic: str | None, partition: Sequence[int], reason: str, **others: Any) -> Any:
        where = {"topic": topic, "partitions": list(partition), "reason": reason}
        return command(where={name: value for name, value in where.items() if value}, **others)

    number = click.option("--partition", type=click.IntRange(0), multiple=True, help="Only this one; may be repeated.")
    why = click.option("--reason", default="", help="Why; shown in the status and noted in the audit.")
    return click.option("--topic", help="Only this topic.")(number(why(run)))


_wait = click.option(
    "--wait", type=click.FloatRange(0, 50), default=10.0, show_default=True, help="Seconds to wait until it is done."
)


@reactive.command("list")
@api_options
def list_(api: Api, output: str) -> None:
    """List consumers: how far behind each is, and why it does not move.

    Example: headrace reactive list
    """
    found = api.get(_CONSUMERS)["consumers"]
    if output == "json":
        print_json(found)
        return
    rows = [
        {
            "consumer": one["name"],
            "group": one["group"],
            "partitions": one["partitionsAssigned"],
            "lag": one["lag"],
            "in_flight": one["inFlight"],
            "state": _state(one),
        }
        for one in found
    ]
    print_rows(rows, output, "no reactive consumers and no functions here")
    for one in found:
        if one["why"]:
            click.echo(_wrapped(f"{one['name']}: {one['why']}"))


@reactive.command()
@click.argument("consumer")
@api_options
def status(consumer: str, api: Api, output: str) -> None:
    """Show where each partition of a consumer stands, and why it does not move.

    Example: headrace reactive status orders
    """
    _show(api.get(_path(consumer)), output)


@reactive.command()
@click.argument("consumer")
@_where
@api_options
def pause(consumer: str, where: Mapping[str, Any], api: Api, output: str) -> None:
    """Have a consumer, or partitions of it, stand still; what is under way ends.

    Example: headrace reactive pause orders --reason "the database is moved"
    """
    _show(api.post(_path(consumer, "pause"), where), output)


@reactive.command()
@click.argument("consumer")
@_where
@api_options
def resume(consumer: str, where: Mapping[str, Any], api: Api, output: str) -> None:
    """Have a consumer go on; without partitions, in all of them.

    Example: headrace reactive resume orders
    """
    _show(api.post(_path(consumer, "resume"), where), output)


@reactive.command()
@click.argument("consumer")
@click.option("--to", required=True, help="begin, end, an offset, a time such as 2026-01-31T12:00, or 2h (ago).")
@_where
@_wait
@api_options
def seek(consumer: str, to: str, where: Mapping[str, Any], wait: float, api: Api, output: str) -> int:
    """Have a consumer go on elsewhere; what is under way ends first.

    Example: headrace reactive seek orders --to 2026-01-31T12:00:00Z --partition 3
    """
    to = "begin" if to == "beginning" else to
    place = {"to": to} if to in ("begin", "end") else {"offset": int(to)} if to.isdecimal() else {"time": Moment()(to)}
    return _tell(api.post(_path(consumer, "seek", wait), {**where, **place}), output)


@reactive.command()
@click.argument("consumer")
@click.argument("offset", type=click.IntRange(0))
@click.option("--partition", type=click.IntRange(0), required=True, help="Partition of the record.")
@click.option("--topic", help="Its topic, if the consumer reads several.")
@click.option("--reason", required=True, help="Why it is passed over; noted in the audit.")
@_wait
@api_options
def skip(consumer: str, wait: float, api: Api, output: str, **record: Any) -> int:
    """Pass over one record for good, without a dead letter.

    Example: headrace reactive skip orders 4711 --partition 3 --reason "no order, see ticket 7"
    """
    given = {name: value for name, value in record.items() if value is not None}
    return _tell(api.post(_path(consumer, "skip", wait), given), output)


@reactive.command("set")
@click.argument("consumer")
@click.option("--rate", "rateRecords", type=float, help="Records per second at most, in each process; 0 for no limit.")
@click.option("--max-records", "maxRecords", type=int, help="Records per delivery at most.")
@click.option("--max-bytes", "maxBytes", type=int, help="Bytes per delivery at most.")
@click.option("--linger", "lingerSeconds", type=float, help="Seconds a delivery waits to fill up.")
@click.option("--max-in-flight", "maxInFlight", type=int, help="Deliveries under way at most.")
@click.option("--reset", is_flag=True, help="Use the settings of the file again.")
@api_options
def set_(consumer: str, reset: bool, api: Api, output: str, **settings: Any) -> None:
    """Change how much a consumer delivers, without a restart.

    Example: headrace reactive set orders --rate 100 --max-records 10
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if not reset and not given:
        raise click.UsageError("nothing is to be changed: name a setting, or --reset")
    if given.get("rateRecords") == 0:
        given["rateRecords"] = None
    answer = api.delete(_path(consumer, "settings")) if reset else {}
    _show(api.patch(_path(consumer, "settings"), given) if given else answer, output)


@reactive.command("take-back")
@click.argument("consumer")
@click.argument("command")
@api_options
def take_back(consumer: str, command: str, api: Api, output: str) -> None:
    """Take back a seek or skip that no process has done yet.

    Example: headrace reactive take-back orders 5f2b0c6d7e81
    """
    answer = api.delete(_path(consumer, f"commands/{part(command)}"))
    if output == "json":
        print_json(answer)
    else:
        click.echo(f"taken back for {', '.join(answer['partitions'])}")


def _path(consumer: str, rest: str = "", wait_seconds: float | None = None) -> str:
    path = f"{_CONSUMERS}/{part(consumer)}" + (f"/{rest}" if rest else "")
    return path if wait_seconds is None else f"{path}?waitSeconds={wait_seconds:g}"


def _show(one: Mapping[str, Any], output: str) -> None:
    if output == "json":
        print_json(one)
        return
    settings = ", ".join(f"{name} {value}" for name, value in one["settings"].items() if value is not None)
    click.echo(f"{one['name']} ({one['kind']}), group {one['group']}, to {one['destination']}")
    click.echo(f"  {settings}")
    of_all = one["why"] if one["paused"] or one.get("kafka") else one["breaker"]["why"]
    if of_all:
        click.echo(_wrapped(of_all))
    for waiting in one["commands"]:
        click.echo(_wrapped("waits to be done: {action} {topic}-{partition} at {offset} ({id})".format(**waiting)))
    rows = [
        {
            "partition": f"{row['topic']}-{row['partition']}",
            "here": "yes" if row["assigned"] else "no",
            **{name: row[name] for name in ("committed", "position", "end", "lag")},
            "in_flight": row["inFlight"],
            "first_open": _head(row["head"]),
        }
        for row in one["partitions"]
    ]
    print_rows(rows, output, "no partitions are known yet")
    reasons: dict[str, list[str]] = {}
    for row in one["partitions"]:
        if row["why"] and row["why"] != of_all:
            reasons.setdefault(row["why"], []).append(f"{row['topic']}-{row['partition']}")
    for why, partitions in reasons.items():
        named = ", ".join(partitions) if len(partitions) <= _NAMED else counted(len(partitions), "partition")
        click.echo(_wrapped(f"{named}: {why}"))


def _state(one: Mapping[str, Any]) -> str:
    if one["paused"]:
        return "paused"
    return "no Kafka" if one.get("kafka") else str(one["breaker"]["state"]).replace("closed", "runs")


def _head(head: Mapping[str, Any] | None) -> str:
    return f"{head['offset']}, {head['ageSeconds']:.0f} s, {counted(head['attempts'], 'attempt')}" if head else ""


def _tell(answer: Mapping[str, Any], output: str) -> int:
    """Show what became of a command; it has failed if nobody has done it, or it was refused."""
    if output == "json":
        print_json(answer)
    else:
        names = ("topic", "partition", "came_from", "offset", "outcome", "by")
        camel = {"came_from": "cameFrom"}
        print_rows([{n: one[camel.get(n, n)] for n in names} for one in answer["results"]], output, "nothing to do")
        said = {one["why"] for one in answer["results"]} | {answer["why"]}
        for why in filter(None, said):
            click.echo(_wrapped(why))
        if answer["pending"]:
            click.echo(f"take it back with: headrace reactive take-back <consumer> {answer['id']}")
    return 0 if all(one["outcome"] in _DONE for one in answer["results"]) else 1


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
