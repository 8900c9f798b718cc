"""`headrace groups`: consumer groups of the cluster, over Kafka."""

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from headrace.admin.cluster.group_administration import GroupAdministration, GroupView, OffsetsRequest
from headrace.cli.cluster_options import ClusterSettings, connection_options
from headrace.cli.global_options import HeadraceGroup
from headrace.cli.options import TARGET
from headrace.cli.output import print_json, print_rows
from headrace.config.topic_names import kind_by_name
from headrace.kafka import Admin
from headrace.runtime import SystemClock


@click.group(cls=HeadraceGroup, aliases={"list": "describe"})
def groups() -> None:
    """List consumer groups; show their lag and members; reset their offsets.

    Example: headrace groups describe billing
    """


@groups.command()
@click.argument("group", nargs=-1)
@connection_options
async def describe(group: Sequence[str], cluster: ClusterSettings, output: str) -> None:
    """Show member, offsets and lag of groups per partition.

    Without GROUP it lists groups with state and number of members: `headrace groups list`.

    Example: headrace groups describe billing
    """
    administration = _administration(cluster)
    if not group:
        print_rows(msgspec.to_builtins(await administration.summaries()), output, "no consumer groups yet")
        return
    views = [await administration.show(name) for name in group]
    if output == "json":
        print_json(msgspec.to_builtins(views))
        return
    rows = [row for view in views for row in _rows(view)]
    print_rows(rows, output, "no group has committed an offset yet")


def _rows(view: GroupView) -> list[dict[str, Any]]:
    member_of = {name: member.client for member in view.members for name in member.partitions}
    return [
        {
            "group": view.group,
            "topic": one.topic,
            "partition": one.partition,
            "member": member_of.get(f"{one.topic}-{one.partition}"),
            "committed": one.committed,
            "end_offset": one.end_offset,
            "lag": one.lag,
        }
        for one in view.offsets
    ]


def _administration(cluster: ClusterSettings) -> GroupAdministration:
    return GroupAdministration(Admin(cluster.kafka), kind_by_name, SystemClock())


@groups.command()
@click.argument("group")
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
    done = await _administration(cluster).reset(group, request)
    print_rows(msgspec.to_builtins(done.offsets), output, "no partitions")
    if not yes:
        active = f"stop its {done.members} active members, then " if done.members else ""
        click.echo(f"preview only: to set these offsets, {active}pass --yes", err=True)
