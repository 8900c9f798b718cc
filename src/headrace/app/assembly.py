"""Makes the consumers of a configuration: reactive consumers, functions and pipelines, with the services they need."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.config.backend import BackendConfig
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.consumer_parts import ConsumerParts
from headrace.consumers.process_context import ProcessContext
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.outcomes import Destination
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import ConfigError, EnvironmentProblem
from headrace.kafka import ReadPolicy, Subscription
from headrace.kafka.internal_topics import InternalTopics
from headrace.runtime import RestartedServices, Service
from headrace.runtime.tls import ClientTlsFiles
from headrace.sidecar.reactive.client import get_offset
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.reactive.healthy_start import StartWhenHealthy
from headrace.sidecar.reactive.http_destination import HttpDestination

if TYPE_CHECKING:  # what a configuration does not name is not imported
    from headrace.app.function_services import FunctionAssembly
    from headrace.functions.destination import FunctionDestination
    from headrace.functions.reload import FunctionReload
    from headrace.functions.spec import FunctionSpec
    from headrace.functions.triggers.http import HttpTrigger
    from headrace.functions.workers import FunctionService
    from headrace.pipelines.runs import PipelineRun
    from headrace.queries.engine_process import QueryEngine
    from headrace.queries.standing import StandingQuery

log = logging.getLogger(__name__)

_FIXED = ("topics", "topic_patterns", "group", "dead_letter", "retry.topics")
"""Settings of a reactive consumer that other parts of the process know from its start."""
_OFFSETS_IN_BACKEND = "its backend keeps the group's offsets (backend.offsets_path), and a replay would move them"


class NoFunctions(NamedTuple):
    """The functions of a configuration without any."""

    known: "Sequence[FunctionSpec]" = ()
    """Functions that this process runs or watches."""
    reloads: "Mapping[str, FunctionReload]" = {}
    """The service that replaces the workers of each function."""
    listening: "Sequence[tuple[FunctionService, HttpTrigger, FunctionDestination]]" = ()
    """Functions that answer requests, with their triggers."""


class Assembly:
    """The consumers of a configuration and their services."""

    def __init__(
        self,
        context: ProcessContext,
        config: HeadraceConfig,
        internal: InternalTopics | None = None,
        *,
        owner: str = "",
        may_read: Callable[[str], bool] | None = None,
        restarts: bool = True,
        engine: "QueryEngine | None" = None,
    ) -> None:
        """Make every consumer; nothing is started or contacted.

        `owner` is empty for those of the file. Without `may_read`, patterns match every topic that is not internal.
        Without `restarts`, the caller restarts the services itself. `engine` evaluates standing queries.

        Raises:
            ConfigError: A client property is not allowed, or two consumers have the same name.
            FunctionInvalid: A function file is not usable.
            PipelineInvalid: A pipeline file is not usable.
        """
        self._context = context
        self._config = config
        self._owner = owner
        self._may_read = may_read
        self.engine = engine
        """Keeps the tables of the file; None without tables."""
        self._standing = _standing_queries(config) if engine else {}
        self.parts = ConsumerParts(context, config, restarts=restarts)
        """The consumers, and what they need."""
        self.function_specs = _load_functions(config)
        triggers = [trigger for spec in self.function_specs for trigger in spec.kafka_triggers]
        self.internal = internal or InternalTopics(config, triggers)
        made: list[Service] = []
        for name in config.reactive_consumers:
            made += self.parts.restarted("reactive", name, functools.partial(self._consumer_of_file, name))
        self.functions: FunctionAssembly | NoFunctions = NoFunctions()
        self.pipelines: Mapping[str, PipelineRun] = {}
        """The runs of pipelines by name."""
        made += [*self._functions(), *self._pipelines()]
        self.services: list[Service] = [*self.parts.cluster_services, *made]
        """Downstream first."""

    async def change(self, config: HeadraceConfig) -> None:
        """Restart the reactive consumers whose settings differ in a new configuration; the others continue.

        Raises:
            ConfigError: A setting is not usable, or needs a restart of the process; nothing was changed.
            EnvironmentProblem: One has not restarted in time, and is tried again.
        """
        new, old = config.reactive_consumers, self._config.reactive_consumers
        if new.keys() != old.keys() or config.queries != self._config.queries:
            raise ConfigError("reactive consumers or queries were added, removed or renamed: restart the process")
        changed = {name: one for name, one in new.items() if one.model_dump() != old[name].model_dump()}
        for name, one in changed.items():
            if fixed := [path for path in _FIXED if _value_at(one, path) != _value_at(old[name], path)]:
                raise ConfigError(f"reactive_consumers.{name}: a change of {fixed[0]} needs a restart of the process")
            self._backend(f"reactive {name}", name, one)  # raises if its files are not usable
        self._config = self._config.model_copy(update={"reactive_consumers": new})
        names = {f"reactive {name}" for name in changed}
        try:
            restarted = [one for one in self.services if isinstance(one, RestartedServices) and one.name in names]
            await asyncio.gather(*(one.restart() for one in restarted))
        except TimeoutError as cause:
            raise EnvironmentProblem("a reactive consumer has not restarted yet; readiness has the reason") from cause

    def _consumer_of_file(self, name: str) -> list[Service]:
        return self._reactive_consumer(name, self._config.reactive_consumers[name])

    def _reactive_consumer(self, name: str, reactive: ReactiveConsumerConfig) -> list[Service]:
        context, label, backend = self._context, f"reactive {name}", reactive.backend
        for warning in reactive.warnings(self._config.kafka.properties):
            log.warning("%s: %s", label, warning)
        tls, destination = self._backend(label, name, reactive)
        delivers = self._filtered(name, destination)
        dead_letters = self.parts.dead_letters(reactive.dead_letter, {topic: topic for topic in reactive.topics})
        matches = self._matches(reactive)
        offsets_of = (
            functools.partial(get_offset, destination.client, backend.offsets_path) if backend.offsets_path else None
        )
        hooks = PumpHooks(on_completed=context.on_completed("REACTIVE_CONSUMER", reactive.group))
        pump, retry_pump, retries = self.parts.pumps(
            label,
            reactive.group,
            reactive.topics,
            reactive,
            delivers,
            dead_letters,
            hooks,
            policy=ReadPolicy(on_gap=reactive.on_gap, member=reactive.consumer),
            flow=reactive.flow,
            when=lambda consumer: self._when_healthy(consumer, destination, backend),
        )
        policy = ReadPolicy(
            reactive.auto_offset_reset, reactive.on_gap, matches is not None, reactive.consumer, offsets_of
        )
        consumer = self.parts.consumer(label, pump, reactive.topics, policy, flow=reactive.flow, admin=context.admin)
        watch = Subscription(
            f"{label} topics", consumer, context.admin, context.clock, topics=reactive.topics, fits=matches
        )
        running = RunningConsumer(
            name=name,
            kind="reactive",
            delivery=reactive,
            topics=reactive.topics,
            matches=matches,
            destination=delivers,
            destination_name=destination.client.url,
            dead_letter=reactive.dead_letter,
            dead_letters=dead_letters,
            pump=pump,
            retry_pump=retry_pump,
            flow=reactive.flow,
            admin=context.admin,
            no_replay=_OFFSETS_IN_BACKEND if offsets_of else "",
            owner=self._owner,
        )
        self.parts.add(running)
        return [*tls, destination, *retries, pump, self._when_healthy(consumer, destination, backend), watch]

    def _functions(self) -> list[Service]:
        if not self._config.functions and not self._config.watched_functions:
            return []
        from headrace.app.function_services import FunctionAssembly

        self.functions = FunctionAssembly(self._context, self._config, self.parts, self.function_specs, self.internal)
        return self.functions.services

    def _pipelines(self) -> list[Service]:
        if not self._config.pipelines:
            return []
        from headrace.app.pipeline_services import PipelineAssembly

        made = PipelineAssembly(self._context, self._config, self.parts, self.internal, self._reactive_consumer)
        self.pipelines = made.runs
        return made.services

    def _filtered(self, name: str, rows: HttpDestination) -> Destination:
        """Return the destination of records: that of rows, behind the filter of a standing query."""
        query = self._standing.get(name)
        if not self.engine or not query:
            return rows
        from headrace.queries.filtered_destination import FilteredDestination

        return FilteredDestination(self.engine, query, rows)

    def _backend(
        self, label: str, name: str, reactive: ReactiveConsumerConfig
    ) -> tuple[list[ClientTlsFiles], HttpDestination]:
        backend, codecs, clock = reactive.backend, self._context.codecs, self._context.clock
        self.parts.formats |= {reactive.key_format, reactive.value_format}
        rows = name in self._standing
        value_format = "json" if rows else reactive.value_format
        keys, values = codecs.for_reading(reactive.key_format), codecs.for_reading(value_format)
        payloads = PayloadDecoder(keys, reactive.key_format, values, value_format)
        tls = [ClientTlsFiles(f"{label} backend.tls", backend.tls, clock)] if backend.secure else []
        tls_context = tls[0].context if tls else None
        return tls, HttpDestination(
            f"{label} backend",
            backend,
            reactive.retry,
            payloads,
            clock,
            tls_context,
            reactive.max_response_bytes,
            rows=rows,
        )

    def _when_healthy(self, consumer: Service, destination: HttpDestination, backend: BackendConfig) -> Service:
        if backend.health is None:
            return consumer
        return StartWhenHealthy(consumer, destination.client, backend.health, self._context.clock)

    def _matches(self, reactive: ReactiveConsumerConfig) -> Callable[[str], bool] | None:
        matches, may_read = self.internal.fits_of(reactive), self._may_read
        if matches is None or may_read is None:
            return matches
        return lambda topic: matches(topic) and may_read(topic)


def _load_functions(config: HeadraceConfig) -> "list[FunctionSpec]":
    if not config.functions:
        return []
    from headrace.functions.load import load_function

    return [load_function(file, config) for file in config.functions]


def _standing_queries(config: HeadraceConfig) -> "Mapping[str, StandingQuery]":
    from headrace.queries.standing import standing_queries

    return standing_queries(config)


def _value_at(settings: ReactiveConsumerConfig, path: str) -> object:
    return functools.reduce(getattr, path.split("."), settings)
