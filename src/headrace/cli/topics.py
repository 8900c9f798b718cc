"""`headrace topics` and `headrace groups`."""

from collections.abc import Sequence

import click

from headrace.cli.cluster_options import ClusterSettings, connection_options
from headrace.cli.options import PAIR
from headrace.cli.output import counted, print_json, print_rows
from headrace.control.health.lag import lag_of
from headrace.control.runs.selection import unhealthy
from headrace.kafka import Admin
from headrace.records import TopicPartition

_SHOWN_CONFIGS = ("cleanup.policy", "retention.ms", "retention.bytes", "min.insync.replicas", "max.message.bytes")


@click.group()
def topics() -> None:
    """List, describe and create topics.

    Example: headrace topics create orders --partitions 3
    """


@topics.command("list")
@connection_options
async def list_topics(cluster: ClusterSettings, output: str) -> None:
    """List topics with partitions, replication factor and unhealthy partitions.

    Example: headrace topics list
    """
    found = await Admin(cluster.kafka).list_topics()
    rows = [
        {
            "topic": topic.name,
            "partitions": len(topic.partitions),
            "replication_factor": topic.replication_factor,
            "unhealthy_partitions": sum(1 for partition in topic.partitions if unhealthy(partition)),
        }
        for topic in found
    ]
    print_rows(rows, output, "no topics yet: headrace topics create NAME")


@topics.command("describe")
@click.argument("topic")
@connection_options
async def describe_(topic: str, cluster: ClusterSettings, output: str) -> None:
    """Show leaders, replicas, in-sync replicas and offsets of each partition, and the configuration.

    Example: headrace topics describe orders
    """
    admin = Admin(cluster.kafka)
    info, offsets = await admin.describe_topic(topic), await admin.topic_offsets(topic)
    rows = [
        {
            "partition": partition.partition,
            "leader": partition.leader,
            "replicas": list(partition.replicas),
            "in_sync": list(partition.in_sync),
            "first_offset": offsets[TopicPartition(topic, partition.partition)][0],
            "end_offset": offsets[TopicPartition(topic, partition.partition)][1],
            "problem": unhealthy(partition) or None,
        }
        for partition in info.partitions
    ]
    configs = await admin.topic_configs(topic)
    if output == "json":
        print_json({"topic": topic, "partitions": rows, "configs": configs})
        return
    print_rows(rows, output, "")
    click.echo("\n" + "\n".join(f"{name}={configs[name]}" for name in _SHOWN_CONFIGS if name in configs))


@topics.command()
@click.argument("topic")
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True, help="Number of partitions.")
@click.option("--replication-factor", type=click.IntRange(1), help="Replicas; the brokers' default if not given.")
@click.option("--set", "settings", multiple=True, type=PAIR, help="Topic configuration by Kafka's name.")
@click.option("--if-not-exists", is_flag=True, help="Succeed if the topic already exists.")
@connection_options
async def create(
    topic: str,
    partitions: int,
    replication_factor: int | None,
    settings: Sequence[tuple[str, str]],
    if_not_exists: bool,
    cluster: ClusterSettings,
    output: str,
) -> int:
    """Create a topic.

    Example: headrace topics create orders --partitions 3 --set retention.ms=86400000
    """
    created = await Admin(cluster.kafka).create_topic(topic, partitions, replication_factor or -1, dict(settings))
    if output == "json":
        print_json({"topic": topic, "created": created})
    elif created:
        click.echo(f"created topic {topic} with {counted(partitions, 'partition')}")
    else:
        click.echo(f"topic {topic} already exists and was not changed: see headrace topics describe {topic}", err=True)
    return 0 if created or if_not_exists else 1


@click.group()
def groups() -> None:
    """List consumer groups; show their lag.

    Example: headrace groups lag billing
    """


@groups.command("list")
@connection_options
async def list_groups(cluster: ClusterSettings, output: str) -> None:
    """List consumer groups with state and number of members.

    Example: headrace groups list
    """
    found = await Admin(cluster.kafka).list_groups()
    rows = [{"group": group.name, "state": group.state, "members": group.members} for group in found]
    print_rows(rows, output, "no consumer groups yet")


@groups.command()
@click.argument("group", nargs=-1)
@connection_options
async def lag(group: Sequence[str], cluster: ClusterSettings, output: str) -> None:
    """Show the lag of groups per partition; by default of all groups.

    Example: headrace groups lag billing
    """
    admin = Admin(cluster.kafka)
    names = group or [known.name for known in await admin.list_groups()]
    rows = [
        {"group": name, **entry.partition._asdict(), "committed": entry.committed, "end": entry.end, "lag": entry.lag}
        for name in names
        for entry in await lag_of(admin, name)
    ]
    print_rows(rows, output, "no group has committed an offset yet")
