"""`headrace reactive`: show and control reactive consumers and functions, over the HTTP API."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from headrace.cli.api import Api, api_options
from headrace.cli.global_options import HeadraceGroup
from headrace.cli.options import TARGET
from headrace.cli.output import counted, print_json, print_result, print_rows
from headrace.commands.routes import ControlEndpoints
from headrace.http.endpoint import Endpoint

_COLUMNS = 100
_MAX_NAMED = 5
_STATES = {"closed": "runs"}
"""States of a breaker in the words of an operator."""
_SUCCEEDED = ("sought", "skipped", "will be skipped", "already completed")


@click.group(cls=HeadraceGroup, aliases={"list": "status"})
def reactive() -> None:
    """Show and control reactive consumers and functions while they run.

    A pause, seek or setting applies to every process of the deployment, over rebalances and restarts.

    Example: headrace reactive status orders
    """


def _partition_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that select partitions; it gets them as `partitions`, the body of the request."""

    @functools.wraps(command)
    def run(topic: str | None, partition: Sequence[int], reason: str, **others: Any) -> Any:
        body = {"topic": topic, "partitions": list(partition), "reason": reason}
        return command(partitions={name: value for name, value in body.items() if value}, **others)

    number = click.option("--partition", type=click.IntRange(0), multiple=True, help="Only this one; may be repeated.")
    why = click.option("--reason", default="", help="Shown in the status and in the audit.")
    return click.option("--topic", help="Only this topic.")(number(why(run)))


@reactive.command()
@click.argument("consumer", required=False)
@api_options
def status(consumer: str | None, api: Api, output: str) -> None:
    """Show the position of each partition of a consumer, and why one stalls.

    Without CONSUMER it lists consumers with their lag: `headrace reactive list`.

    Example: headrace reactive status orders
    """
    if consumer is not None:
        _print_consumer(api.call(ControlEndpoints.show, name=consumer), output)
        return
    found = api.call(ControlEndpoints.list)["consumers"]
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


def _consumer_command(endpoint: Endpoint, name: str, text: str) -> None:
    @click.argument("consumer")
    @_partition_options
    @api_options
    def command(consumer: str, api: Api, output: str, partitions: Mapping[str, Any]) -> None:
        _print_consumer(api.call(endpoint, partitions, name=consumer), output)

    command.__doc__ = f"{text}\n\n    Example: headrace reactive {name} orders\n    "
    reactive.command(name)(command)


_PAUSE = "Pause a consumer, or some of its partitions. Deliveries in flight finish first."
_consumer_command(ControlEndpoints.pause, "pause", _PAUSE)
_consumer_command(ControlEndpoints.resume, "resume", "Resume a consumer, or some of its partitions.")


@reactive.command()
@click.argument("consumer")
@click.option("--to", "target", type=TARGET, help="earliest, latest, an offset, 2026-01-31T12:00, or 2h (ago).")
@click.option("--cancel", default="", metavar="COMMAND", help="Cancel this pending seek or skip instead.")
@_partition_options
@api_options
def seek(
    consumer: str, target: dict[str, Any] | None, cancel: str, partitions: dict[str, Any], api: Api, output: str
) -> int:
    """Move a consumer to another position. Deliveries in flight finish first.

    Example: headrace reactive seek orders --to 2026-01-31T12:00:00Z --partition 3
    """
    if bool(target) == bool(cancel) or (cancel and partitions):
        raise click.UsageError("pass --to POSITION, or --cancel COMMAND alone")
    if cancel:
        response = api.call(ControlEndpoints.cancel, name=consumer, id=cancel)
        print_result(response, f"cancelled for {', '.join(response['partitions'])}", output)
        return 0
    return _print_results(api.call(ControlEndpoints.seek, {**partitions, **(target or {})}, name=consumer), output)


@reactive.command()
@click.argument("consumer")
@click.argument("offset", type=click.IntRange(0))
@click.option("--partition", type=click.IntRange(0), required=True, help="Partition of the record.")
@click.option("--topic", help="Its topic, if the consumer reads several.")
@click.option("--reason", required=True, help="Shown in the audit.")
@api_options
def skip(consumer: str, api: Api, output: str, **record: Any) -> int:
    """Skip one record permanently, without a dead letter.

    Example: headrace reactive skip orders 4711 --partition 3 --reason "not an order, see issue 7"
    """
    given = {name: value for name, value in record.items() if value is not None}
    return _print_results(api.call(ControlEndpoints.skip, given, name=consumer), output)


@reactive.command("set")
@click.argument("consumer")
@click.option("--rate", "rateRecords", type=float, help="Maximum records per second in each process; 0 for no limit.")
@click.option("--max-records", "maxRecords", type=int, help="Maximum records per delivery.")
@click.option("--max-bytes", "maxBytes", type=int, help="Maximum bytes per delivery.")
@click.option("--linger", "lingerSeconds", type=float, help="Seconds that a delivery waits for more records.")
@click.option("--max-in-flight", "maxInFlight", type=int, help="Maximum deliveries in flight.")
@click.option("--reset", is_flag=True, help="Use the settings of the file again.")
@api_options
def set_(consumer: str, reset: bool, api: Api, output: str, **settings: Any) -> None:
    """Change how much a consumer delivers, without a restart.

    Example: headrace reactive set orders --rate 100 --max-records 10
    """
    given = {name: value for name, value in settings.items() if reset or value is not None}
    if not given:
        raise click.UsageError("nothing to change: pass a setting or --reset")
    if given.get("rateRecords") == 0:
        given["rateRecords"] = None
    if reset:
        given = {**dict.fromkeys(settings), **given}
    _print_consumer(api.call(ControlEndpoints.change_settings, given, name=consumer), output)


def _print_consumer(one: Mapping[str, Any], output: str) -> None:
    if output == "json":
        print_json(one)
        return
    settings = ", ".join(f"{name} {value}" for name, value in one["settings"].items() if value is not None)
    click.echo(f"{one['name']} ({one['kind']}), group {one['group']}, to {one['destination']}")
    click.echo(f"  {settings}")
    of_all = one["why"] if one["paused"] or one.get("kafka") else one["breaker"]["why"]
    if of_all:
        click.echo(_wrapped(of_all))
    for pending in one["commands"]:
        click.echo(_wrapped("pending: {action} {topic}-{partition} at {offset} ({id})".format(**pending)))
    rows = [
        {
            "partition": f"{row['topic']}-{row['partition']}",
            "here": "yes" if row["assigned"] else "no",
            **{name: row[name] for name in ("committed", "position", "end", "lag")},
            "in_flight": row["inFlight"],
            "head": _head(row["head"]),
        }
        for row in one["partitions"]
    ]
    print_rows(rows, output, "no known partitions yet")
    reasons: dict[str, list[str]] = {}
    for row in one["partitions"]:
        if row["why"] and row["why"] != of_all:
            reasons.setdefault(row["why"], []).append(f"{row['topic']}-{row['partition']}")
        if share := row.get("keyShare"):
            text = f"one key has {share * 100:.0f} % of the records that were received and are not completed"
            reasons.setdefault(text, []).append(f"{row['topic']}-{row['partition']}")
    for why, partitions in reasons.items():
        named = ", ".join(partitions) if len(partitions) <= _MAX_NAMED else counted(len(partitions), "partition")
        click.echo(_wrapped(f"{named}: {why}"))


def _state(one: Mapping[str, Any]) -> str:
    if one["paused"]:
        return "paused"
    state = str(one["breaker"]["state"])
    return "no Kafka" if one.get("kafka") else _STATES.get(state, state)


def _head(head: Mapping[str, Any] | None) -> str:
    return f"{head['offset']}, {head['ageSeconds']:.0f} s, {counted(head['attempts'], 'attempt')}" if head else ""


def _print_results(response: Mapping[str, Any], output: str) -> int:
    """Print the results of a command; returns 1 if a partition is pending or refused."""
    if output == "json":
        print_json(response)
    else:
        results = response["results"]
        rows = [
            {
                "topic": one["topic"],
                "partition": one["partition"],
                "from": one["cameFrom"],
                "offset": one["offset"],
                "outcome": one["outcome"],
                "by": one["by"],
            }
            for one in results
        ]
        print_rows(rows, output, "nothing to do")
        for why in dict.fromkeys([*(one["why"] for one in results), response["why"]]):
            if why:
                click.echo(_wrapped(why))
        if response["pending"]:
            click.echo(f"cancel it with: headrace reactive seek <consumer> --cancel {response['id']}")
    return 0 if all(one["outcome"] in _SUCCEEDED for one in response["results"]) else 1


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
