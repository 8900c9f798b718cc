"""Replays, jobs and dead letters of one process, with their endpoints."""

import socket
from typing import Any

from headrace.consumers.process_context import ProcessContext
from headrace.consumers.running_consumer import RunningConsumers
from headrace.kafka import CompactedTable, Lease
from headrace.kafka.internal_topics import InternalTopics
from headrace.runs.dead_letter_jobs import DeadLetterJobs
from headrace.runs.dead_letters.origins import Origins
from headrace.runs.dead_letters.pages import DeadLetterPages
from headrace.runs.dead_letters.routes import DeadLetterEndpoints
from headrace.runs.jobs import Jobs
from headrace.runs.redelivery import Redelivery
from headrace.runs.redrive_spec import TO_ORIGIN, Target
from headrace.runs.replay import RunContext
from headrace.runs.replay_requests import Replays, conflict
from headrace.runs.routes import JobEndpoints


def jobs_of(
    context: ProcessContext, table: CompactedTable[Any], consumers: RunningConsumers, internal: InternalTopics
) -> tuple[Jobs, JobEndpoints]:
    """Return the service that runs jobs, and its endpoints; it starts after all services that deliver records."""
    dead_letter_jobs = dead_letter_jobs_of(context, consumers, internal)

    def lease_of(name: str) -> Lease:
        return Lease(context.config.kafka, context.admin, name, context.clock)

    jobs = Jobs(table, lease_of, dead_letter_jobs.make, conflict, context.clock)
    return jobs, JobEndpoints(jobs, dead_letter_jobs.replays, dead_letter_jobs)


def dead_letter_jobs_of(
    context: ProcessContext, consumers: RunningConsumers, internal: InternalTopics, redrive_to: Target = TO_ORIGIN
) -> DeadLetterJobs:
    """Return the maker of runs that redrive, move and drop dead letters; without a consumer, to `redrive_to`."""
    run_context = _run_context(context)
    replays = Replays(run_context, consumers, internal, producing=context.config.producer.enabled)
    on_sent = context.audit.produced if context.audit else None
    return DeadLetterJobs(run_context, replays, Origins(internal), on_sent, redrive_to=redrive_to)


def dead_letters(context: ProcessContext, consumers: RunningConsumers) -> DeadLetterEndpoints:
    """Return the endpoints of dead letters; those of `consumers` can be delivered again."""
    config, admin, clock = context.config, context.admin, context.clock
    redelivery = Redelivery(_run_context(context), consumers, socket.gethostname())
    pages = DeadLetterPages(admin, context.codecs, clock, config.reactive_consumers.values())
    return DeadLetterEndpoints(pages, redelivery)


def _run_context(context: ProcessContext) -> RunContext:
    audited = context.audited_produce("STREAMING_PRODUCER", in_order=True)
    return RunContext(context.admin, context.inner_producer.produce, audited, context.clock)
