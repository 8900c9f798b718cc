"""What steers the consumers of a process: the control table, who does what it says, and what the endpoints speak to."""

from __future__ import annotations

import os
import socket

from headrace.app.ways_in import Surroundings, WaysIn
from headrace.control.commands import Commands
from headrace.control.lag import LagMonitor
from headrace.control.steered_status import Statuses
from headrace.control.steering import Steering
from headrace.kafka import ControlTable
from headrace.lifecycle import Service
from headrace.web.routes.control import ControlRoom


class Controls:
    """The control table of a process and what goes by it."""

    def __init__(self, process: Surroundings, ways_in: WaysIn, lag: LagMonitor) -> None:
        """Make them; nothing is started, no one is contacted."""
        config, clock, audit = process.config, process.clock, process.audit
        topics = [topic for one in ways_in.steered if one.admin is process.admin for topic in one.topics]
        source = next(iter(topics), "")
        self.member = f"{socket.gethostname()}:{config.http.port} (pid {os.getpid()})"
        """This process's name for people."""
        self.table = ControlTable(
            config.kafka, process.admin, config.control.topic, source, process.inner_producer, clock
        )
        self.steering = Steering(self.table, self.member, lag.of, clock)
        for consumer in ways_in.steered:
            self.steering.add(consumer)
        used = ways_in.steered or config.registrations.backends
        self.services: list[Service] = [self.table, self.steering] if used else []
        if not used:
            self.table.missing = "no consumer runs in this process; ask one that has one, or name one in its file"
        """To start before what consumes, so that what is paused does not begin."""

        def note(action: str, target: str, reason: str, outcome: str) -> None:
            if audit:
                audit.control(action, target, reason=reason, outcome=outcome)

        statuses = Statuses(self.steering, lag.of, self.member, clock)
        self.room = ControlRoom(self.steering, statuses, Commands(self.steering, clock), note)
        """What the endpoints speak to."""
