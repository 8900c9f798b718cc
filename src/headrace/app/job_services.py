"""Replays, jobs and dead letters of one process, with their endpoints."""

import socket
from typing import Any

from headrace.app.context import ProcessContext
from headrace.control.dead_letters.origins import Origins
from headrace.control.dead_letters.pages import DeadLetterPages
from headrace.control.dead_letters.routes import DeadLetterEndpoints
from headrace.control.running_consumer import RunningConsumers
from headrace.control.runs.dead_letter_jobs import DRY_RUN_SECONDS, DeadLetterJobs
from headrace.control.runs.jobs import Jobs
from headrace.control.runs.redelivery import Redelivery
from headrace.control.runs.redrive_spec import TO_ORIGIN, Target
from headrace.control.runs.replay import RunContext
from headrace.control.runs.replay_requests import Replays, conflict
from headrace.control.runs.routes import JobEndpoints
from headrace.kafka import CompactedTable, Lease
from headrace.kafka.internal_topics import InternalTopics


def jobs_of(
    context: ProcessContext,
    table: CompactedTable[Any],
    consumers: RunningConsumers,
    internal: InternalTopics,
    *,
    of_command: bool = False,
    redrive_to: Target = TO_ORIGIN,
) -> tuple[Jobs, JobEndpoints]:
    """Return the service that runs jobs, to start after all that carries records, and its endpoints.

    Jobs `of_command` need no lease, a failure ends them, and a dry run may take any time.
    """
    config, admin, clock = context.config, context.admin, context.clock
    audited = context.audited_produce("STREAMING_PRODUCER", in_order=True)
    run_context = RunContext(admin, context.inner_producer.produce, audited, clock)
    replays = Replays(run_context, consumers, internal, producing=config.producer.enabled)
    on_sent = context.audit.produced if context.audit else None
    dry_run_seconds = None if of_command else DRY_RUN_SECONDS
    dead_letter_jobs = DeadLetterJobs(
        run_context, replays, Origins(internal), on_sent, redrive_to=redrive_to, dry_run_seconds=dry_run_seconds
    )

    def lease_of(name: str) -> Lease:
        return (_HeldLease if of_command else Lease)(config.kafka, admin, name, clock)

    jobs = Jobs(table, lease_of, dead_letter_jobs.make, conflict, clock, retries=not of_command)
    return jobs, JobEndpoints(jobs, replays, dead_letter_jobs)


def dead_letters(context: ProcessContext, consumers: RunningConsumers) -> DeadLetterEndpoints:
    """Return the endpoints of dead letters; those of these consumers can be delivered again."""
    config, admin, clock = context.config, context.admin, context.clock
    produce = context.inner_producer.produce
    redelivery = Redelivery(admin, consumers, produce, clock, socket.gethostname())
    pages = DeadLetterPages(admin, context.codecs, clock, config.reactive_consumers.values())
    return DeadLetterEndpoints(pages, redelivery)


class _HeldLease(Lease):
    """The lease of a job that no other process knows."""

    async def acquire(self, limit_seconds: float = 0.0) -> bool:
        return True

    async def check(self) -> None:
        """Return: it cannot be lost."""
