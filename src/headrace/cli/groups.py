"""`headrace groups`: list, lag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from headrace.cli.connection import find, kafka_options, run_async
from headrace.cli.output import output_option, print_rows
from headrace.control.groups import lag_of
from headrace.kafka import Admin, PartitionLag


@click.group()
def groups() -> None:
    """List consumer groups; see their lag.

    Example: headrace groups lag billing
    """


@groups.command("list")
@kafka_options
@output_option
def list_(bootstrap_servers: str | None, config: Path | None, output: str) -> None:
    """List consumer groups with state and number of members.

    Example: headrace groups list
    """
    found = run_async(Admin(find(bootstrap_servers, config).kafka).list_groups())
    rows = [{"group": group.name, "state": group.state, "members": group.members} for group in found]
    print_rows(rows, output, "no consumer groups yet")


@groups.command()
@click.argument("group", nargs=-1)
@kafka_options
@output_option
def lag(group: Sequence[str], bootstrap_servers: str | None, config: Path | None, output: str) -> None:
    """Show how far groups are behind on each partition; all groups if none is named.

    Example: headrace groups lag billing
    """
    found = run_async(_lags(Admin(find(bootstrap_servers, config).kafka), group))
    rows = [
        {
            "group": name,
            "topic": entry.partition.topic,
            "partition": entry.partition.partition,
            "committed": entry.committed,
            "end": entry.end,
            "lag": entry.lag,
        }
        for name, entry in found
    ]
    print_rows(rows, output, "no group has committed an offset yet")


async def _lags(admin: Admin, wanted: Sequence[str]) -> list[tuple[str, PartitionLag]]:
    names = list(wanted) or [group.name for group in await admin.list_groups()]
    return [(name, entry) for name in names for entry in await lag_of(admin, name)]
