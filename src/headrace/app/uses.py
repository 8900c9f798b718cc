"""What a configuration reads and writes, for whoever judges whether the cluster is fit for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace.config.internal_topics import InternalTopics
from headrace.config.model import HeadraceConfig
from headrace.control.doctor import examine
from headrace.control.preconditions import Finding, Use
from headrace.functions.spec import FunctionSpec, triggers_of
from headrace.kafka import Admin


def examination(
    config: HeadraceConfig, functions: Sequence[FunctionSpec], admin: Admin
) -> Callable[[], Awaitable[Sequence[Finding]]]:
    """Return what examines every cluster that a configuration uses; `admin` is the door to its own."""
    own = config.kafka.bootstrap_servers
    used = [
        (admin if servers == own else Admin(config.kafka.model_copy(update={"bootstrap_servers": servers})), uses)
        for servers, uses in uses_of(config, functions).items()
    ]

    async def run() -> list[Finding]:
        creates = config.kafka.create_topics
        return [finding for admin, uses in used for finding in await examine(admin, uses, creates_topics=creates)]

    return run


def uses_of(config: HeadraceConfig, functions: Sequence[FunctionSpec]) -> Mapping[str, Sequence[Use]]:
    """Return what is used, by bootstrap servers."""
    internal = InternalTopics(config, triggers_of(functions))
    uses: dict[str, list[Use]] = {config.kafka.bootstrap_servers: []}
    for reactive in config.reactive_consumers.values():
        fits = internal.fits_of(reactive)
        letters = reactive.dead_letter.topic_for if reactive.dead_letter.enabled else None
        use = Use(reactive.group, reactive.topics, fits, letters)
        tiers = reactive.retry.tier_topics(reactive.group)  # one that is missing is made, or writing to it says so
        retries = [Use(f"{reactive.group}.retry", [], tiers.__contains__)] if tiers else []
        uses[config.kafka.bootstrap_servers] += [use, *retries]
    for trigger in triggers_of(functions):
        servers = ",".join(trigger.brokers) or config.kafka.bootstrap_servers
        letters = trigger.dead_letter.topic_for if trigger.dead_letter.enabled else None
        uses.setdefault(servers, []).append(Use(trigger.group, trigger.topics, None, letters))
    return uses
