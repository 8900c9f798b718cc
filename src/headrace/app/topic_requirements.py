"""The topics that a configuration reads and writes, for the checks of durability and of registrations."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from headrace.admin.health.examination import examine
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.preconditions import Finding, TopicRequirement
from headrace.kafka import Admin
from headrace.kafka.internal_topics import InternalTopics

if TYPE_CHECKING:
    from headrace.functions.spec import FunctionSpec


def examination(
    config: HeadraceConfig, functions: "Sequence[FunctionSpec]", admin: Admin
) -> Callable[[], Awaitable[Sequence[Finding]]]:
    """Return the function that examines every cluster of a configuration; `admin` is the one for `kafka`."""
    clusters = [
        (admin if kafka is config.kafka else Admin(kafka), required)
        for kafka, required in topic_requirements(config, functions)
    ]

    async def run() -> list[Finding]:
        creates = config.kafka.create_topics
        return [
            found
            for cluster, required in clusters
            for found in await examine(cluster, required, creates_topics=creates, dead_letters=admin)
        ]

    return run


def topic_requirements(
    config: HeadraceConfig, functions: "Sequence[FunctionSpec]"
) -> Sequence[tuple[KafkaConfig, list[TopicRequirement]]]:
    """Return the topics of consumers, functions and tables by cluster and login, those of the configuration first."""
    internal = InternalTopics(config, [trigger for spec in functions for trigger in spec.kafka_triggers])
    own: list[TopicRequirement] = []
    found = [(config.kafka, own)]
    for name, reactive in config.reactive_consumers.items():
        own.append(
            TopicRequirement(
                f"reactive_consumers.{name}",
                reactive.group,
                reactive.topics,
                internal.fits_of(reactive),
                reactive.dead_letter.topic_for if reactive.dead_letter.enabled else None,
                reactive.retry.topic_names(reactive.group),
            )
        )
    for name, table in config.tables.items():
        own.append(TopicRequirement(f"table {name}", "", [table.topic], table=table))
    for spec in functions:
        for trigger in spec.kafka_triggers:
            cluster = trigger.kafka.cluster(config.kafka)
            dead_letter_topic = trigger.dead_letter.topic_for if trigger.dead_letter.enabled else None
            label = f"function {spec.name}.{trigger.name}"
            required = TopicRequirement(label, trigger.kafka.group, trigger.topics, None, dead_letter_topic)
            same = [each for kafka, each in found if kafka.model_dump() == cluster.model_dump()]
            if not same:
                found.append((cluster, []))
            (same[0] if same else found[-1][1]).append(required)
    return found
