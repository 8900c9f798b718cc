"""Which topics a configuration reads and writes, for the checks of durability and of registrations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace.config.internal_topics import InternalTopics
from headrace.config.model import HeadraceConfig
from headrace.control.doctor import examine
from headrace.control.preconditions import Finding, TopicRequirement
from headrace.functions.spec import FunctionSpec, triggers_of
from headrace.kafka import Admin


def examination(
    config: HeadraceConfig, functions: Sequence[FunctionSpec], admin: Admin
) -> Callable[[], Awaitable[Sequence[Finding]]]:
    """Return what examines every cluster that a configuration uses; `admin` serves the cluster in `kafka`."""
    own = config.kafka.bootstrap_servers
    clusters = [
        (admin if servers == own else Admin(config.kafka.model_copy(update={"bootstrap_servers": servers})), required)
        for servers, required in topic_requirements(config, functions).items()
    ]

    async def run() -> list[Finding]:
        creates = config.kafka.create_topics
        return [
            found for admin, required in clusters for found in await examine(admin, required, creates_topics=creates)
        ]

    return run


def topic_requirements(
    config: HeadraceConfig, functions: Sequence[FunctionSpec]
) -> Mapping[str, Sequence[TopicRequirement]]:
    """Return the topics of every consumer and function, by bootstrap servers."""
    internal = InternalTopics(config, triggers_of(functions))
    found: dict[str, list[TopicRequirement]] = {config.kafka.bootstrap_servers: []}
    for name, reactive in config.reactive_consumers.items():
        found[config.kafka.bootstrap_servers].append(
            TopicRequirement(
                f"reactive_consumers.{name}",
                reactive.group,
                reactive.topics,
                internal.fits_of(reactive),
                reactive.dead_letter.topic_for if reactive.dead_letter.enabled else None,
                reactive.retry.tier_topics(reactive.group),
            )
        )
    for spec in functions:
        for trigger in spec.triggers:
            servers = ",".join(trigger.kafka.brokers) or config.kafka.bootstrap_servers
            dead_letter_topic = trigger.dead_letter.topic_for if trigger.dead_letter.enabled else None
            label = f"function {spec.name}.{trigger.name}"
            required = TopicRequirement(label, trigger.kafka.group, trigger.topics, None, dead_letter_topic)
            found.setdefault(servers, []).append(required)
    return found
