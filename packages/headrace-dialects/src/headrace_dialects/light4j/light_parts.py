"""The endpoints of the light-4j sidecar in one process, made of the parts of the core that do their work."""

import socket
from collections.abc import Sequence

from headrace.admin.process.administration_parts import AdministrationParts
from headrace.commands.command_parts import CommandParts
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runs.run_parts import RunParts, run_context_of
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.sidecar.active.active_parts import ActiveParts
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.reactive.client import BackendClient
from headrace_dialects.light4j.audit_routes import AuditEndpoints
from headrace_dialects.light4j.chaos import Assault, Chaos, Disturbance
from headrace_dialects.light4j.chaos_routes import ChaosEndpoints
from headrace_dialects.light4j.dead_letter_routes import INSTANCE, ActiveDeadLetterEndpoints
from headrace_dialects.light4j.influx_push import InfluxPush
from headrace_dialects.light4j.influxdb import InfluxLines
from headrace_dialects.light4j.light_sections import LightSections
from headrace_dialects.light4j.metadata_replays import MetadataReplays
from headrace_dialects.light4j.metadata_routes import MetadataEndpoints
from headrace_dialects.light4j.pass_through import PassThrough
from headrace_dialects.light4j.redelivery import Redelivery
from headrace_dialects.light4j.redelivery_routes import RedeliveryEndpoints


class LightParts(Parts):
    """The endpoints, and the assaults and the pushes of metrics if the settings have any."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._process = process = context.process
        self._audit = context.audit
        self._chaos = Chaos(context.clock, self._disturb)
        self._chaos.on_end = self._ended
        sections = context.config.section(LightSections)
        self._services: list[Service] = [self._chaos] if sections.admin.chaos != "none" else []
        if influxdb := sections.metrics.influxdb:
            lines = InfluxLines(influxdb.url, sections.audit.service_id, context.host)
            context.metrics.on_request = lines.request
            self._services.append(InfluxPush(influxdb, context.metrics, lines, context.clock))
        config, running, runs = context.config, needed.of(ConsumersParts).running, needed.of(RunParts)
        replays = MetadataReplays(runs.jobs, runs.replays, running, producing=config.producer.enabled)
        pass_through = PassThrough(sections.admin.pass_through, BackendClient)
        needed.of(AdministrationParts).administration.before = pass_through.answer
        self.endpoints: list[object] = [
            AuditEndpoints(context.audit, config.http.max_records),
            RedeliveryEndpoints(Redelivery(run_context_of(context), running, socket.gethostname())),
            MetadataEndpoints(runs.jobs, replays),
            ChaosEndpoints(lambda: process.in_force, self._chaos, pass_through),
        ]
        if instances := needed.of(ActiveParts).instances:
            self.endpoints.append(_active_dead_letters(context, needed, instances))

    def services(self) -> Sequence[Service]:
        return self._services

    def _disturb(self, disturbance: Disturbance | None) -> None:
        for gate in self._process.gates:
            gate.disturbance = disturbance

    def _ended(self, assault: Assault) -> None:
        if self._audit:
            self._audit.control(f"end assault {assault}", "process")


def _active_dead_letters(
    context: ProcessContext, needed: NeededParts, instances: ActiveInstances
) -> ActiveDeadLetterEndpoints:
    config, running = context.config, needed.of(ConsumersParts).running
    # Each process has an instance of its own in the group, so that no call depends on another process.
    name = f"{INSTANCE}-{context.host}-{config.http.port}" if needed.of(CommandParts).owners else INSTANCE
    return ActiveDeadLetterEndpoints(
        config.active_consumers,
        instances,
        context.admin,
        context.codecs,
        running,
        context.audited_produce(),
        context.admin.ensure_topic_like if config.kafka.create_topics else None,
        name,
    )
