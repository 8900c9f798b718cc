"""Runs on dead letters inside one command, with the Kafka rights of its caller: no job, no port, no consumer."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import msgspec

from headrace.app.topic_requirements import topic_requirements
from headrace.config.audit_config import AuditConfig
from headrace.config.model import HeadraceConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import InvalidRequest
from headrace.kafka import Producer
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import make_context
from headrace.runs.dead_letter_jobs import DeadLetterJobRequest, Kind
from headrace.runs.redrive import OnProgress
from headrace.runs.redrive_spec import Redriven
from headrace.runs.run_parts import dead_letter_jobs_of
from headrace.runtime import Service, Supervisor, SystemClock
from headrace.runtime.telemetry.correlation import caller

_RUN_SECONDS = 30.0
"""For a cancelled run to save its progress."""
_DRAIN_SECONDS = 5.0
"""Then for records and audit events in flight."""


class CommandRuns:
    """Redrives, moves and drops dead letters.

    Only one run on dead letters at a time has the lease, also among other processes. Events go to the audit topic of
    the configuration, if it has one.
    """

    def __init__(self, config: HeadraceConfig, by: str) -> None:
        """Make it; nothing is started or contacted.

        Raises:
            ConfigError: A client property is not allowed.
            FunctionInvalid: A function file is not usable.
        """
        clock, self._by = SystemClock(), by
        internal = InternalTopics(config)
        topic_requirements(config, internal)
        audit = config.audit if config.audit.to == "topic" else AuditConfig(to="none")
        context = make_context(config.model_copy(update={"audit": audit, "producer": ProducerConfig()}), clock)
        context = dataclasses.replace(context, inner_producer=Producer(config.kafka, ProducerConfig(), "command"))
        self._runs = dead_letter_jobs_of(context, {}, internal)
        self._audit, self._running = context.audit, asyncio.Lock()
        services: list[Service | None] = [context.inner_producer, context.audit_producer, context.audit]
        self._supervisor = Supervisor([each for each in services if each], clock, _DRAIN_SECONDS)

    async def start(self) -> None:
        """Start the services that runs need."""
        await self._supervisor.start()

    async def run(self, kind: Kind, topic: str, body: dict[str, Any], on_progress: OnProgress) -> Redriven:
        """Do what the body of a request for a job describes, or only report it.

        If this is cancelled, the run stops early and saves its progress; `stop` waits for that.

        Raises:
            HeadraceError: See `DeadLetterJobs.redrive`, and `Redrive.run`.
        """
        caller.set(self._by)
        try:
            request = msgspec.convert(body, DeadLetterJobRequest)
        except msgspec.ValidationError as cause:
            raise InvalidRequest(f"the request is not valid: {cause}") from cause
        async with self._running:
            redrive = await self._runs.redrive(kind, topic, request, self._by)
            if self._audit and not request.dry_run:
                self._audit.control(kind, topic, reason=request.reason)
            return await redrive.run(asyncio.Event(), on_progress)

    async def stop(self) -> None:
        """Wait until a cancelled run has ended, then stop everything else."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RUN_SECONDS), self._running:
                pass
        await self._supervisor.drain()
        await self._supervisor.stop()
