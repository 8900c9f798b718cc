"""`headrace groups`: list, lag."""

from collections.abc import Sequence

import click

from headrace.cli.connection import ClusterSettings, kafka_options
from headrace.cli.output import print_rows
from headrace.control.lag import lag_of
from headrace.kafka import Admin


@click.group()
def groups() -> None:
    """List consumer groups; see their lag.

    Example: headrace groups lag billing
    """


@groups.command("list")
@kafka_options
async def list_(cluster: ClusterSettings, output: str) -> None:
    """List consumer groups with state and number of members.

    Example: headrace groups list
    """
    found = await Admin(cluster.kafka).list_groups()
    rows = [{"group": group.name, "state": group.state, "members": group.members} for group in found]
    print_rows(rows, output, "no consumer groups yet")


@groups.command()
@click.argument("group", nargs=-1)
@kafka_options
async def lag(group: Sequence[str], cluster: ClusterSettings, output: str) -> None:
    """Show the lag of groups on each partition; of all groups if none is named.

    Example: headrace groups lag billing
    """
    admin = Admin(cluster.kafka)
    names = group or [known.name for known in await admin.list_groups()]
    rows = [
        {
            "group": name,
            "topic": entry.partition.topic,
            "partition": entry.partition.partition,
            "committed": entry.committed,
            "end": entry.end,
            "lag": entry.lag,
        }
        for name in names
        for entry in await lag_of(admin, name)
    ]
    print_rows(rows, output, "no group has committed an offset yet")
