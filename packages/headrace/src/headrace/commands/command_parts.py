"""Live control of one process: the control table, what applies it to consumers, and the owners of instances."""

from collections.abc import Sequence
from functools import partial

from headrace.commands.commands import Commands
from headrace.commands.consumer_control import ConsumerControl
from headrace.commands.consumer_status import ConsumerStatuses
from headrace.commands.instance_owners import InstanceOwners
from headrace.commands.placement.consumer_groups import ConsumerGroups
from headrace.commands.placement.placements import Placements
from headrace.commands.routes import ControlEndpoints
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.http.forwarding import Forwarder
from headrace.kafka import JSON_OBJECTS, CompactedTable, InternalTopic, Lease
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.runtime.tls import ClientTlsFiles


class CommandParts(Parts):
    """The control table and what reads it."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._context = context
        self._consumers = consumers = needed.of(ConsumersParts)
        config, clock = context.config, context.clock
        topic, produce = InternalTopic(config.control.topic), context.inner_producer.produce
        self.table = CompactedTable(context.admin, topic, JSON_OBJECTS, produce, clock, optional="control")
        self.control = ConsumerControl(self.table, consumers.running, context.member, consumers.lag.of, clock)
        """Applies the table to the consumers of this process."""
        consumers.consumers.on_made = self.control.add
        statuses = ConsumerStatuses(self.control, consumers.lag.of, clock)
        self.endpoints = [
            ControlEndpoints(self.control, statuses, Commands(self.control, clock), context.process.others)
        ]
        self.owners: InstanceOwners | None = None
        """Which process has which active consumer; None without peers."""
        self.owner_services: list[Service] = []
        """Those of the owners; active consumers start them."""
        self.placements: Placements | None = None
        """Which consumers this process runs; None if it runs all. Reactive consumers start it."""
        self.placed: ConsumerGroups | None = None
        """The consumers and functions of the file, if they are placed."""
        lease_of = partial(Lease, config.kafka, context.admin, clock=clock)
        if placement := config.placement:
            share = context.process.share
            name = f"{placement.process}.{share.number}" if placement.process and share else placement.process
            self.placements = placements = Placements(
                self.table, placement, name or context.host, lease_of, context.admin, config.state_dir, clock
            )
            placed = ConsumerGroups(context, consumers, self.control, placements.process, registered=False)
            self.placed = placed
            placements.follow("file", lambda: placed.of_file, lambda: placed.apply_placed(placements.runs))
        if config.cluster.peers:
            self.owners = InstanceOwners(self.table, config.cluster.url or "", lease_of, context.admin, clock)
            tls = ClientTlsFiles("cluster.tls", config.cluster.tls, clock)
            self.owner_services = [tls, self.owners]
            context.process.forwarder = Forwarder(config.cluster, config.http, self.owners, tls.context, clock)
        if context.process.others:
            context.process.others.forwarder = context.process.forwarder

    @property
    def is_used(self) -> bool:
        """Whether this process reads the control table: it has consumers, registrations or peers."""
        config = self._context.config
        read = self._consumers.consumers.consumers, config.registrations.backends, config.cluster.peers
        return any(read) or bool(self.placements)

    def services(self) -> Sequence[Service]:
        if not self.is_used:
            self.table.turn_off("this process runs no consumer: send the request to another, or add one to its file")
            return []
        servers, consumers = self._context.admin.servers, self._consumers.consumers.consumers
        topics = (topic for each in consumers if each.admin.servers == servers for topic in each.topics)
        # Created like the first topic that is read on the same cluster.
        self.table.topic = self.table.topic._replace(source=next(topics, ""))
        # A paused consumer must not start, so the table is read before the consumers start.
        return [self.table, self.control]
