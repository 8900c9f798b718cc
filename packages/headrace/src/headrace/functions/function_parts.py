"""The functions of one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.commands.command_parts import CommandParts
from headrace.config.http import HttpConfig
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.consumers.preconditions import TopicRequirement
from headrace.errors import ConfigError
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts, Reload

if TYPE_CHECKING:  # what a configuration does not name is not imported
    from headrace.functions.running_functions import RunningFunctions
    from headrace.functions.spec import FunctionSpec
    from headrace.functions.triggers.http_requests import FunctionRequests

_RELOAD = "replaces its workers; its consumers stay in their groups"


class FunctionParts(Parts):
    """The running functions and their listeners."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._context = context
        config, parts = context.config, needed.of(ConsumersParts)
        self._running: RunningFunctions | None = None
        if config.functions:
            from headrace.functions.running_functions import RunningFunctions

            specs = _load(config)
            parts.internal.add(trigger for spec in specs for trigger in spec.kafka_triggers)
            parts.consumers.requirements += _requirements(config, specs)

            def made(one: tuple[Path, FunctionSpec], consumers: ConsumerSet) -> Sequence[Service]:
                return RunningFunctions(context, consumers, [one], parts.internal).services

            everywhere = []
            for one in zip(config.functions, specs, strict=True):
                label = f"function {one[1].name}"
                if (placed := needed.of(CommandParts).placed) and one[1].only_groups:
                    placed.of_file[label] = placed.spec(label, partial(made, one))
                else:
                    everywhere.append(one)
            self._running = RunningFunctions(context, parts.consumers, everywhere, parts.internal)

    def services(self) -> Sequence[Service]:
        return self._running.services if self._running else ()

    def reloads(self) -> Mapping[str, Reload]:
        reloads = self._running.reloads if self._running else {}
        return {f"function {name}": Reload(_RELOAD, one.reload) for name, one in reloads.items()}

    def listeners(self, http: HttpConfig) -> Sequence[tuple[HttpConfig, FunctionRequests, str]]:
        if not self._running or not self._running.listening:
            return ()
        from headrace.functions.triggers.http_requests import FunctionRequests

        found = []
        for workers, trigger, destination in self._running.listening:
            own = http.model_copy(update={"port": trigger.port, "max_body_bytes": trigger.max_body_bytes})
            if self._context.process.share and not trigger.port:
                raise ConfigError(f"{workers.name}: several processes cannot share port 0: choose a port")
            requests = FunctionRequests(workers, trigger, destination, own)
            found.append((own, requests, requests.name))
        return found


def required_topics(config: HeadraceConfig, internal: InternalTopics) -> Iterable[tuple[KafkaConfig, TopicRequirement]]:
    """Return what the functions of a configuration need of the topics they read, and the cluster of each.

    Raises:
        FunctionInvalid: A function file is not usable.
    """
    specs = _load(config)
    internal.add(trigger for spec in specs for trigger in spec.kafka_triggers)
    return _requirements(config, specs)


def _load(config: HeadraceConfig) -> Sequence[FunctionSpec]:
    if not config.functions:
        return ()
    from headrace.functions.load import load_function

    return [load_function(file, config) for file in config.functions]


def _requirements(config: HeadraceConfig, specs: Sequence[FunctionSpec]) -> list[tuple[KafkaConfig, TopicRequirement]]:
    found = []
    for spec in specs:
        for trigger in spec.kafka_triggers:
            dead_letter_topic = trigger.dead_letter.topic_for if trigger.dead_letter.enabled else None
            label = f"function {spec.name}.{trigger.name}"
            required = TopicRequirement(label, trigger.kafka.group, trigger.topics, None, dead_letter_topic)
            found.append((trigger.kafka.cluster(config.kafka), required))
    return found
