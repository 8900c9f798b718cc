"""Makes reactive consumers, with the services they need."""

import functools
import logging
from collections.abc import Callable

from headrace.config.backend import BackendConfig
from headrace.config.consumers import ReactiveConsumerConfig, condition_of
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.checked_destination import CheckedDestination, younger_than
from headrace.delivery.outcomes import Destination
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.kafka import ReadPolicy, Subscription
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.tls import ClientTlsFiles
from headrace.sidecar.reactive.client import get_offset
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.reactive.healthy_start import StartWhenHealthy
from headrace.sidecar.reactive.http_destination import HttpDestination

log = logging.getLogger(__name__)

_OFFSETS_IN_BACKEND = "its backend keeps the group's offsets (backend.offsets_path), and a replay would move them"


class ReactiveConsumers:
    """Makes reactive consumers, and adds each to a set."""

    def __init__(
        self,
        context: ProcessContext,
        consumers: ConsumerSet,
        internal: InternalTopics,
        *,
        owner: str = "",
        may_read: Callable[[str], bool] | None = None,
    ) -> None:
        """Prepare. `owner` is empty for those of the file. Patterns match what `may_read` allows, by default all."""
        self._context = context
        self._config = context.config
        self._consumers = consumers
        self._internal = internal
        self._owner = owner
        self._may_read = may_read

    def check(self, name: str, reactive: ReactiveConsumerConfig) -> None:
        """Raise ConfigError if the files of its backend are not usable."""
        self._backend(f"reactive {name}", name, reactive)

    def make(self, name: str, reactive: ReactiveConsumerConfig) -> list[Service]:
        """Make a consumer; return its services, downstream first. Nothing is started or contacted."""
        context, label, backend = self._context, f"reactive {name}", reactive.backend
        for warning in reactive.warnings(self._config.kafka.properties):
            log.warning("%s: %s", label, warning)
        tls, destination = self._backend(label, name, reactive)
        filtered = self._consumers.filters.get(name)
        delivers = self._checked(reactive, filtered(destination) if filtered else destination)
        dead_letters = self._consumers.dead_letters(reactive.dead_letter, {topic: topic for topic in reactive.topics})
        matches = self._matches(reactive)
        offsets_of = (
            functools.partial(get_offset, destination.client, backend.offsets_path) if backend.offsets_path else None
        )
        hooks = PumpHooks(on_completed=context.on_completed("REACTIVE_CONSUMER", reactive.group))
        pump, retry_pump, retries = self._consumers.pumps(
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
        self._consumers.add(running)
        policy = ReadPolicy(
            reactive.auto_offset_reset, reactive.on_gap, matches is not None, reactive.consumer, offsets_of
        )
        return [*tls, destination, *retries, pump, *self._source(label, reactive, pump, policy, matches, destination)]

    def _source(
        self,
        label: str,
        reactive: ReactiveConsumerConfig,
        pump: Pump,
        policy: ReadPolicy,
        matches: Callable[[str], bool] | None,
        destination: HttpDestination,
    ) -> list[Service]:
        """Make what reads the topics, and what watches which topics there are."""
        admin, clock, topics = self._context.admin, self._context.clock, reactive.topics
        consumer = self._consumers.consumer(label, pump, topics, policy, flow=reactive.flow, admin=admin)
        watch = Subscription(f"{label} topics", consumer, admin, clock, topics=topics, fits=matches)
        return [self._when_healthy(consumer, destination, reactive.backend), watch]

    def _backend(
        self, label: str, name: str, reactive: ReactiveConsumerConfig
    ) -> tuple[list[ClientTlsFiles], HttpDestination]:
        backend, codecs, clock = reactive.backend, self._context.codecs, self._context.clock
        self._consumers.formats |= {reactive.key_format, reactive.value_format}
        rows = name in self._consumers.filters
        value_format = "json" if rows else reactive.value_format
        keys, values = codecs.for_reading(reactive.key_format), codecs.for_reading(value_format)
        payloads = PayloadDecoder(keys, reactive.key_format, values, value_format)
        tls = [ClientTlsFiles(f"{label} backend.tls", backend.tls, clock)] if backend.secure else []
        tls_context = tls[0].context if tls else None
        return tls, HttpDestination(
            name, backend, reactive.retry, payloads, clock, tls_context, reactive.max_response_bytes, rows=rows
        )

    def _checked(self, reactive: ReactiveConsumerConfig, destination: Destination) -> Destination:
        checks = [condition_of(reactive.where)] if reactive.where else []
        if reactive.max_age_seconds:
            checks.append(younger_than(reactive.max_age_seconds, self._context.clock))
        return CheckedDestination(destination, checks) if checks else destination

    def _when_healthy(self, consumer: Service, destination: HttpDestination, backend: BackendConfig) -> Service:
        if backend.health is None:
            return consumer
        return StartWhenHealthy(consumer, destination.client, backend.health, self._context.clock)

    def _matches(self, reactive: ReactiveConsumerConfig) -> Callable[[str], bool] | None:
        matches, may_read = self._internal.fits_of(reactive), self._may_read
        if matches is None or may_read is None:
            return matches
        return lambda topic: matches(topic) and may_read(topic)
