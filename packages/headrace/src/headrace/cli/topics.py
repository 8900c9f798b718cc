"""`headrace topics`: topics of the cluster, over Kafka."""

from collections.abc import Sequence

import click
import msgspec

from headrace.admin.cluster.topic_administration import TopicAdministration, TopicChangeRequest
from headrace.cli.cluster_options import ClusterSettings, connection_options
from headrace.cli.global_options import HeadraceGroup
from headrace.cli.options import PAIR
from headrace.cli.output import counted, print_json, print_result, print_rows
from headrace.config.topic_names import kind_by_name
from headrace.kafka import Admin

_SHOWN_CONFIGS = ("cleanup.policy", "retention.ms", "retention.bytes", "min.insync.replicas", "max.message.bytes")


@click.group(cls=HeadraceGroup, aliases={"list": "describe"})
def topics() -> None:
    """List, describe, create, alter and delete topics.

    Example: headrace topics create orders --partitions 3
    """


@topics.command("describe")
@click.argument("topic", required=False)
@connection_options
async def describe_(topic: str | None, cluster: ClusterSettings, output: str) -> None:
    """Show leaders, replicas, in-sync replicas and offsets of each partition, and the configuration.

    Without TOPIC it lists topics with partitions, replication factor and unhealthy partitions: `headrace topics list`.

    Example: headrace topics describe orders
    """
    if topic is not None:
        await _describe(topic, TopicAdministration(Admin(cluster.kafka), kind_by_name), output)
        return
    found = await Admin(cluster.kafka).list_topics()
    rows = [
        {
            "topic": topic.name,
            "partitions": len(topic.partitions),
            "replication_factor": topic.replication_factor,
            "unhealthy_partitions": sum(1 for partition in topic.partitions if partition.problem),
        }
        for topic in found
    ]
    print_rows(rows, output, "no topics yet: headrace topics create NAME")


async def _describe(topic: str, administration: TopicAdministration, output: str) -> None:
    view = await administration.show(topic)
    if output == "json":
        print_json(msgspec.to_builtins(view))
        return
    rows = [
        {
            **msgspec.to_builtins(one),
            "replicas": [replica.broker for replica in one.replicas],
            "in_sync": [replica.broker for replica in one.replicas if replica.in_sync],
        }
        for one in view.partitions
    ]
    print_rows(rows, output, "")
    configs = {one.name: one.value for one in (await administration.configs(topic)).configs}
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
    admin = Admin(cluster.kafka)
    TopicAdministration(admin, kind_by_name).check_changeable(topic)
    created = await admin.create_topic(topic, partitions, replication_factor or -1, dict(settings))
    if output == "json":
        print_json({"topic": topic, "created": created})
    elif created:
        click.echo(f"created topic {topic} with {counted(partitions, 'partition')}")
    else:
        click.echo(f"topic {topic} already exists and was not changed: see headrace topics describe {topic}", err=True)
    return 0 if created or if_not_exists else 1


@topics.command()
@click.argument("topic")
@click.option("--set", "settings", multiple=True, type=PAIR, help="Topic configuration by Kafka's name.")
@click.option("--unset", "unset", multiple=True, metavar="NAME", help="Restore the default of a configuration.")
@click.option("--partitions", type=click.IntRange(1, 10_000), help="The new total; Kafka cannot remove partitions.")
@click.option("--dry-run", is_flag=True, help="Print what would change.")
@connection_options
async def alter(
    topic: str,
    settings: Sequence[tuple[str, str]],
    unset: Sequence[str],
    partitions: int | None,
    dry_run: bool,
    cluster: ClusterSettings,
    output: str,
) -> None:
    """Change configurations of a topic, add partitions. Others keep their values.

    Example: headrace topics alter orders --set retention.ms=86400000 --partitions 6 --dry-run
    """
    request = TopicChangeRequest({**dict(settings), **dict.fromkeys(unset)}, partitions, dry_run)
    changed = await TopicAdministration(Admin(cluster.kafka), kind_by_name).change(topic, request)
    if output == "json":
        print_json(msgspec.to_builtins(changed))
        return
    print_rows([msgspec.to_builtins(change) for change in changed.changes], output, "nothing changes")


@topics.command()
@click.argument("topic")
@click.option("--yes", is_flag=True, help="Delete without asking for the name.")
@connection_options
async def delete(topic: str, yes: bool, cluster: ClusterSettings, output: str) -> int:
    """Delete a topic with its records; asks for its name again.

    Example: headrace topics delete orders
    """
    administration = TopicAdministration(Admin(cluster.kafka), kind_by_name)
    administration.check_changeable(topic)
    if not yes and click.prompt(f"type {topic} to delete it with its records", default="", err=True) != topic:
        click.echo(f"topic {topic} was not deleted: the names differ", err=True)
        return 1
    await administration.delete(topic)
    print_result({"topic": topic, "deleted": True}, f"deleted topic {topic}", output)
    return 0
