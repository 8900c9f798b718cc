"""What the features of one process share: configuration, clock, Kafka clients, codecs, metrics, audit, listeners."""

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.config.model import HeadraceConfig
from headrace.config.process_share import ProcessShare
from headrace.config.producer_config import ProducerConfig
from headrace.delivery.outcomes import OnCompleted, Outcome, Reply
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.http.forwarding import Forwarder
from headrace.http.other_processes import OtherProcesses
from headrace.kafka import Admin, Producer, Reachability, TopicDirectory
from headrace.records import Produce, Record
from headrace.runtime import Clock, Service, Signals, Supervisor, run_blocking
from headrace.runtime.feature_parts import Parts
from headrace.runtime.process_link import ProcessLink
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.audit_events import Consumption
from headrace.runtime.telemetry.audit_targets import AuditFile, AuditTarget, AuditTopic
from headrace.runtime.telemetry.metrics import Metrics

_LARGEST_RECORD_BYTES = 1_000_000_000
_AUDIT_LINGER_MS = 20
_LINGER_MS = 5
"""For many records at once, such as frames of a function; a single request is sent without waiting."""


class Disturbed(Protocol):
    """What requests pass on their way to a listener's endpoints."""

    disturbance: Any


@dataclasses.dataclass(eq=False)
class Process:
    """The process itself: what runs it, and what its listeners offer. Complete before anything starts."""

    in_force: HeadraceConfig
    """The settings in force: those of the start, and sections that were read again since."""
    supervisor: Supervisor
    signals: Signals
    share: ProcessShare | None = None
    """Its share, if it is one of several processes of a run."""
    link: ProcessLink | None = None
    """The link to the process that started this one, if there are several."""
    others: OtherProcesses | None = None
    """The others, if there are several: for requests that are about all."""
    forwarder: Forwarder | None = None
    """Forwards requests to the processes of the deployment, if it has peers."""
    read_again: Callable[[], HeadraceConfig] | None = None
    """Reads the configuration again; None if it is in no file."""
    on_read: list[Callable[[HeadraceConfig], None]] = dataclasses.field(default_factory=list)
    """Called with each configuration that was read again."""
    parts: Mapping[str, Parts] = dataclasses.field(default_factory=dict)
    """The parts of each feature by its name."""
    gates: list[Disturbed] = dataclasses.field(default_factory=list)
    """The gate of each listener that an assault may disturb."""
    urls: Callable[[], Mapping[str, str]] = dict
    """Returns the address of each listener by its name, once the ports are known."""

    async def read_config(self) -> HeadraceConfig:
        """Read the configuration again. Only where `read_again` is set."""
        assert self.read_again
        config = await run_blocking(self.read_again)
        for note in self.on_read:
            note(config)
        return config

    def changed(self, **sections: object) -> None:
        """Show sections that were read again, and have a process that starts later get them, too."""
        self.in_force = self.in_force.model_copy(update=sections)
        if self.link:
            self.link.send(RELOADED=next(iter(sections)))


@dataclasses.dataclass(frozen=True)
class ProcessContext:
    """Made once per process; its parts do not depend on their users."""

    config: HeadraceConfig
    clock: Clock
    metrics: Metrics
    admin: Admin
    topics: TopicDirectory
    producer: Producer
    """Writes the records of requests."""
    inner_producer: Producer
    """Writes dead letters, outputs of functions and internal topics; may be the same."""
    registry: SchemaRegistry
    codecs: Codecs
    audit: Audit | None
    audit_producer: Producer | None
    """Writes the audit topic, with a separate byte limit, so events never use up the limit of records."""
    process: Process

    @property
    def host(self) -> str:
        """Name of this machine, with the number of this process if it is one of several."""
        share = self.process.share
        return socket.gethostname() + (f".{share.number}" if share else "")

    @property
    def member(self) -> str:
        """Name of this process as people see it: host, port and process id."""
        return f"{self.host}:{self.config.http.port} (pid {os.getpid()})"

    @property
    def services(self) -> list[Service]:
        """The services that start before all others, in order."""
        clients: list[Service | None] = [self.admin.reachability, self.topics, self.producer, self.inner_producer]
        return [each for each in dict.fromkeys([self.registry.tls, *clients, self.audit_producer, self.audit]) if each]

    def on_completed(self, audit_type: str, group: str) -> OnCompleted | None:
        """Return the function that audits a group's completed records; None without an audit."""
        if self.audit is None:
            return None
        consumed = self.audit.consumed

        def on_completed(
            records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
        ) -> None:
            consumed(Consumption(audit_type, group, replay), records, size_bytes, how, replies)

        return on_completed

    def audited_produce(self, audit_type: str = "PRODUCER", *, in_order: bool = False) -> Produce:
        """Return the function that writes records with the inner producer and audits them, if there is an audit."""
        produce = functools.partial(self.inner_producer.produce, in_order=in_order)
        return self.audit.audited(produce, audit_type) if self.audit else produce


def make_context(
    config: HeadraceConfig, clock: Clock, share: ProcessShare | None = None, link: ProcessLink | None = None
) -> ProcessContext:
    """Make the clients of a process; nothing is started or contacted. One of several has a share and a link."""
    metrics = Metrics()
    reachability = Reachability(config.kafka, clock)
    admin = Admin(config.kafka, reachability)
    producer = inner = Producer(config.kafka, config.producer, admin=admin, refuses=True)
    if config.reactive_consumers or config.functions or config.registrations.backends:
        inner = Producer(config.kafka, inner_settings(config), "inner_producer", admin)
    registry = SchemaRegistry(config.schema_registry, clock)
    audit, audit_producer = _audit(config, admin, metrics, clock)
    return ProcessContext(
        config,
        clock,
        metrics,
        admin,
        TopicDirectory(admin, clock),
        producer,
        inner,
        registry,
        Codecs(registry, plain_unions=config.schema_registry.avro_unions == "plain"),
        audit,
        audit_producer,
        _process(config, clock, share, link),
    )


def _process(config: HeadraceConfig, clock: Clock, share: ProcessShare | None, link: ProcessLink | None) -> Process:
    supervisor, others = Supervisor([], clock, config.drain_seconds), None
    if share:
        urls = {number: url for number, url in enumerate(share.urls) if number != share.number}
        others = OtherProcesses(share.number, urls)
    return Process(config, supervisor, Signals(), share, link, others)


def inner_settings(config: HeadraceConfig) -> ProducerConfig:
    """Return the settings for outputs and dead letters; a dead letter is a record that Kafka accepted, plus headers."""
    own = {"linger.ms": _LINGER_MS, **config.producer.lasting.properties, "message.max.bytes": _LARGEST_RECORD_BYTES}
    return config.producer.lasting.with_properties(own)


def transactional_id(config: HeadraceConfig) -> str:
    """Return the start of the names of this process's transactional producers."""
    return config.producer.transactions.id or f"headrace-{socket.gethostname()}-{config.http.port}"


def _audit(
    config: HeadraceConfig, admin: Admin, metrics: Metrics, clock: Clock
) -> tuple[Audit | None, Producer | None]:
    settings = config.audit
    if settings.to == "none":
        return None, None
    producer: Producer | None = None
    target: AuditTarget = AuditFile(settings.file)
    if settings.to == "topic":
        lasting = config.producer.lasting.model_copy(update={"max_pending_bytes": settings.max_pending_bytes})
        lasting = lasting.with_properties({"linger.ms": _AUDIT_LINGER_MS, **lasting.properties})
        producer = Producer(config.kafka, lasting, "audit_producer", admin, partition_share=1.0)
        target = AuditTopic(settings.topic, functools.partial(producer.produce, sliced=True))
    return Audit(settings, target, metrics, clock), producer
