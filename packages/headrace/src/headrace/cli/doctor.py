"""`headrace doctor`: whether cluster and machine meet the preconditions of durability."""

from collections.abc import Sequence

import click

from headrace.admin.health.examination import examination, examine
from headrace.app.topic_requirements import topic_requirements
from headrace.cli.cluster_options import ClusterSettings, kafka_options
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.machine_checks import machine_checks
from headrace.cli.output import print_rows
from headrace.config.model import HeadraceConfig
from headrace.consumers.feature_checks import feature_checks
from headrace.consumers.preconditions import Finding, TopicRequirement
from headrace.errors import HeadraceError, KafkaUnauthorized
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin
from headrace.runtime import SystemClock


@click.command(cls=HeadraceCommand)
@click.argument("topics", nargs=-1)
@kafka_options
async def doctor(topics: Sequence[str], cluster: ClusterSettings, output: str) -> int:
    """Check the preconditions of durability, and print what to do.

    With a headrace.yaml it checks every topic that is read or written, the machine, certificates, and the servers that
    the file names. Without one it checks the cluster and TOPICS. Exit code 1 if a check fails; warnings do not count.

    Example: headrace doctor -c headrace.yaml
    """
    found: list[Finding] = []
    try:
        if cluster.file:
            config = cluster.file.model_copy(update={"kafka": cluster.kafka})
            found += [*await _machine(config), *machine_checks(config)]
            required = topic_requirements(config)
            found += await examination(config.kafka, Admin(cluster.kafka), lambda: required)()
        if topics or not cluster.file:
            of_topics = [TopicRequirement("", "(any)", topics)] if topics else []
            found += await examine(Admin(cluster.kafka), of_topics, creates_topics=True)
    except HeadraceError as error:
        check = "rights" if isinstance(error, KafkaUnauthorized) else "reachable"
        found.append(Finding("cluster", check, "failing", "no", error.description))
    order = ("failing", "warning", "ok")
    rows = [one._asdict() for one in sorted(dict.fromkeys(found), key=lambda one: order.index(one.state))]
    print_rows(rows, output, "nothing to check")
    return int(any(one.state == "failing" for one in found))


async def _machine(config: HeadraceConfig) -> list[Finding]:
    found = [one for checks in feature_checks() for one in await checks.machine(config)]
    if "schema_registry" in config.model_fields_set:
        registry = SchemaRegistry(config.schema_registry, SystemClock())
        try:
            await registry.check()
            found.append(Finding("schema registry", "reachable", "ok", "yes"))
        except HeadraceError as error:
            found.append(Finding("schema registry", "reachable", "failing", "no", error.description))
        finally:
            await registry.close()
    return found
