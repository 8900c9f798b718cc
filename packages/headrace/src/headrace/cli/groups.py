"""`headrace groups`: consumer groups of the cluster, over Kafka."""

from collections.abc import Sequence
from typing import Any

import click

from headrace.admin.cluster.group_administration import GroupAdministration, OffsetsRequest
from headrace.cli.cluster_options import ClusterSettings, connection_options
from headrace.cli.completion import group_names
from headrace.cli.global_options import HeadraceGroup
from headrace.cli.options import TARGET
from headrace.cli.output import print_rows
from headrace.config.topic_names import kind_by_name
from headrace.consumers.lag import lag_of
from headrace.kafka import Admin
from headrace.runtime import SystemClock


@click.group(cls=HeadraceGroup, aliases={"list": "describe"})
def groups() -> None:
    """List consumer groups; show their lag and members; reset their offsets.

    Example: headrace groups describe billing
    """


@groups.command()
@click.argument("group", nargs=-1, shell_complete=group_names)
@click.option("--all", "of_all", is_flag=True, help="All groups.")
@connection_options
async def describe(group: Sequence[str], of_all: bool, cluster: ClusterSettings, output: str) -> None:
    """Show member, offsets and lag of groups per partition.

    Without GROUP it lists groups with state and number of members: `headrace groups list`.

    Example: headrace groups describe billing
    """
    admin = Admin(cluster.kafka)
    known = [] if group and not of_all else await admin.list_groups()
    rows: list[dict[str, Any]] = []
    if not group and not of_all:
        rows = [{"group": one.name, "state": one.state, "members": one.members} for one in known]
        print_rows(rows, output, "no consumer groups yet")
        return
    for name in [one.name for one in known] if of_all else group:
        lags = await lag_of(admin, name)
        member_of = {p: member.client for member in await admin.group_members(name) for p in member.partitions}
        rows += [
            {
                "group": name,
                **entry.partition._asdict(),
                "member": member_of.get(entry.partition),
                "committed": entry.committed,
                "end": entry.end,
                "lag": entry.lag,
            }
            for entry in lags
        ]
    print_rows(rows, output, "no group has committed an offset yet")


@groups.command(
    removed={f"--{name}": f"headrace groups reset GROUP --to {name.upper()}" for name in ("offset", "time")}
)
@click.argument("group", shell_complete=group_names)
@click.option("--to", "target", type=TARGET, help="earliest, latest, an offset, 2026-01-31T08:00, or 2h (ago).")
@click.option("--shift", type=click.IntRange(-(2**62), 2**62), help="Added to the committed offset; may be negative.")
@click.option("--topic", help="This topic; by default all with a committed offset.")
@click.option("--partition", "partitions", multiple=True, type=click.IntRange(0), help="A partition of --topic.")
@click.option("--yes", is_flag=True, help="Set the offsets; without it they are only printed.")
@connection_options
async def reset(
    group: str,
    target: dict[str, Any] | None,
    partitions: Sequence[int],
    yes: bool,
    cluster: ClusterSettings,
    output: str,
    **others: Any,
) -> None:
    """Set the committed offsets of a group without members; prints a preview unless --yes is passed.

    Example: headrace groups reset billing --shift -100 --yes
    """
    request = OffsetsRequest(partitions=list(partitions) or None, dry_run=not yes, **others, **(target or {}))
    done = await GroupAdministration(Admin(cluster.kafka), kind_by_name, SystemClock()).reset(group, request)
    rows = [
        {"topic": one.topic, "partition": one.partition, "before": one.before, "after": one.after, "lag": one.lag}
        for one in done.offsets
    ]
    print_rows(rows, output, "no partitions")
    if not yes:
        active = f"stop its {done.members} active members, then " if done.members else ""
        click.echo(f"preview only: to set these offsets, {active}pass --yes", err=True)
