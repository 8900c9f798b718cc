"""The HTTP application inside one command: it opens no port, starts no consumer, and keeps its jobs in memory."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.app.context import make_context
from headrace.app.job_services import jobs_of
from headrace.config.audit import AuditConfig
from headrace.config.http import HttpConfig
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.control.runs.redrive_spec import Target
from headrace.functions.load import load_function
from headrace.functions.spec import triggers_of
from headrace.http.application import Application
from headrace.http.endpoint import Endpoint
from headrace.kafka import JSON_OBJECTS, Admin, CompactedTable, InternalTopic, Producer
from headrace.kafka.internal_topics import InternalTopics
from headrace.records import OutgoingRecord, Produced, Record
from headrace.runtime import Clock, Deadline, Service, Supervisor, SystemClock
from headrace.runtime.telemetry.correlation import caller

_JOBS_SECONDS, _DRAIN_SECONDS = 30.0, 5.0
"""For jobs to end with what has ended saved; then for records and audit notes in flight."""


class CommandProcess:
    """Serves the endpoints of jobs with the Kafka rights of the command's caller.

    Jobs are not in the control topic, which the caller may have no right to write: they end with the command. Runs
    on dead letters exclude each other by the same lease as everywhere. Notes go to the audit topic of the
    configuration, if it has one.
    """

    def __init__(self, config: HeadraceConfig, by: str, redrive_to: Target) -> None:
        """Make it; nothing is started or contacted.

        Raises:
            ConfigError: A client property is not allowed.
            FunctionInvalid: A function file is not usable.
        """
        clock = self._clock = SystemClock()
        self._by = by
        internal = InternalTopics(config, triggers_of(load_function(file, config) for file in config.functions))
        audit = config.audit if config.audit.to == "topic" else AuditConfig(to="none")
        context = make_context(config.model_copy(update={"audit": audit, "producer": ProducerConfig()}), clock)
        context = dataclasses.replace(context, inner_producer=Producer(config.kafka, ProducerConfig(), "command"))
        table = _MemoryTable(context.admin, clock)
        self._jobs, endpoints = jobs_of(context, table, {}, internal, of_command=True, redrive_to=redrive_to)
        services: list[Service | None] = [context.inner_producer, context.audit_producer, context.audit, self._jobs]
        self._supervisor = Supervisor([each for each in services if each], clock, _DRAIN_SECONDS)
        self._application = Application(HttpConfig(), [endpoints], context.metrics, audit=context.audit)

    async def start(self) -> None:
        """Start what jobs need."""
        await self._supervisor.start()

    async def call(
        self, endpoint: Endpoint, body: object, query: Mapping[str, object] | None, parameters: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Serve a request; return its status and body."""
        caller.set(self._by)
        return await self._application.call(endpoint, body, query, **parameters)

    async def stop(self) -> None:
        """End jobs early, with what has ended saved, and then everything else."""
        with contextlib.suppress(TimeoutError):
            await self._jobs.drain(Deadline(self._clock, _JOBS_SECONDS))
        await self._supervisor.drain()
        await self._supervisor.stop()


class _MemoryTable(CompactedTable[Any]):
    """Keeps its entries in this process only."""

    def __init__(self, admin: Admin, clock: Clock) -> None:
        super().__init__(admin, InternalTopic("jobs"), JSON_OBJECTS, self._keep, clock)
        self._next = 0
        self.loaded(0)

    async def catch_up(self) -> None:
        """Do nothing: no other process writes."""

    async def _keep(self, records: Sequence[OutgoingRecord]) -> list[Produced]:
        first, self._next = self._next, self._next + len(records)
        found = [Record(each.topic, 0, first + n, 0, each.key, each.value) for n, each in enumerate(records)]
        self.read(found, self._next)
        return [Produced(0, record.offset) for record in found]
