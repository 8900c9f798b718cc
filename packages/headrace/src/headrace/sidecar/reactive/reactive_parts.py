"""The reactive consumers of one process."""

import asyncio
import functools
from collections.abc import Iterable, Mapping, Sequence

from headrace.commands.command_parts import CommandParts
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.consumers.preconditions import TopicRequirement
from headrace.errors import ConfigError, EnvironmentProblem
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace.runtime import RestartedServices, Service
from headrace.runtime.feature_parts import NeededParts, Parts, Reload
from headrace.sidecar.reactive.reactive_consumers import ReactiveConsumers

_FIXED = ("topics", "topic_patterns", "group", "dead_letter", "retry.topics")
"""Settings of a reactive consumer that other parts of the process know from its start."""


class ReactiveParts(Parts):
    """The reactive consumers of the configuration, and their change while the process runs."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._parts = parts = needed.of(ConsumersParts)
        self._context = context
        self._settings = dict(context.config.reactive_consumers)
        self._maker = ReactiveConsumers(context, parts.consumers, parts.internal)
        parts.consumers.requirements += required_topics(context.config, parts.internal)
        self._services: list[Service] = []
        commands = needed.of(CommandParts)
        if commands.placed and commands.placements:
            for name in self._settings:
                made = functools.partial(self._made, name)
                commands.placed.of_file[name] = commands.placed.spec(f"reactive {name}", made)
            self._services += [commands.placed, commands.placements]
            return
        for name in self._settings:
            make = functools.partial(self._made, name, parts.consumers)
            self._services += parts.consumers.restarted("reactive", name, make)

    def services(self) -> Sequence[Service]:
        return self._services

    def reloads(self) -> Mapping[str, Reload]:
        if not (self._context.process.read_again and self._settings) or self._context.config.placement:
            return {}
        how = "restarts the reactive consumers whose settings in the configuration have changed; others continue"
        return {"reactive_consumers": Reload(how, self._read_again)}

    async def _read_again(self) -> None:
        config = await self._context.process.read_config()
        await self.change(config)
        self._context.process.changed(reactive_consumers=config.reactive_consumers)

    async def change(self, config: HeadraceConfig) -> None:
        """Restart the reactive consumers whose settings differ in a new configuration; the others continue.

        Raises:
            ConfigError: A setting is not usable, or needs a restart of the process; nothing was changed.
            EnvironmentProblem: One has not restarted in time, and is tried again.
        """
        new, old = config.reactive_consumers, self._settings
        for check in self._parts.consumers.reload_checks:
            check(config)
        if new.keys() != old.keys():
            raise ConfigError("reactive consumers were added, removed or renamed: restart the process")
        changed = {name: one for name, one in new.items() if one.model_dump() != old[name].model_dump()}
        for name, one in changed.items():
            if fixed := [path for path in _FIXED if _value_at(one, path) != _value_at(old[name], path)]:
                raise ConfigError(f"reactive_consumers.{name}: a change of {fixed[0]} needs a restart of the process")
            self._maker.check(name, one)
        self._settings = dict(new)
        names = {f"reactive {name}" for name in changed}
        try:
            restarted = [one for one in self._services if isinstance(one, RestartedServices) and one.name in names]
            await asyncio.gather(*(one.restart() for one in restarted))
        except TimeoutError as cause:
            raise EnvironmentProblem("a reactive consumer has not restarted yet; readiness has the reason") from cause

    def _made(self, name: str, consumers: ConsumerSet) -> list[Service]:
        return ReactiveConsumers(self._context, consumers, self._parts.internal).make(name, self._settings[name])


def required_topics(config: HeadraceConfig, internal: InternalTopics) -> Iterable[tuple[KafkaConfig, TopicRequirement]]:
    """Return what reactive consumers need of the topics they read, and the cluster of each."""
    for name, reactive in config.reactive_consumers.items():
        yield (
            config.kafka,
            TopicRequirement(
                f"reactive_consumers.{name}",
                reactive.group,
                reactive.topics,
                internal.fits_of(reactive),
                reactive.dead_letter.topic_for if reactive.dead_letter.enabled else None,
                reactive.retry.topic_names(reactive.group),
            ),
        )


def _value_at(settings: ReactiveConsumerConfig, path: str) -> object:
    return functools.reduce(getattr, path.split("."), settings)
