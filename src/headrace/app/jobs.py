"""Replays, jobs and dead letters of one process, with their endpoints."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from headrace.app.context import ProcessContext
from headrace.config.internal_topics import InternalTopics
from headrace.control.dead_letter_jobs import DeadLetterJobs
from headrace.control.dead_letter_pages import DeadLetterPages
from headrace.control.jobs import Jobs
from headrace.control.origins import Origins
from headrace.control.redelivery import Redelivery
from headrace.control.replay import RunContext
from headrace.control.replays import Replays, conflict
from headrace.control.running_consumer import RunningConsumer
from headrace.kafka import CompactedTable, Lease
from headrace.web.routes.dead_letters import DeadLetterEndpoints
from headrace.web.routes.jobs import JobEndpoints


def jobs_of(
    context: ProcessContext,
    table: CompactedTable[Any],
    consumers: Mapping[str, RunningConsumer],
    internal: InternalTopics,
) -> tuple[Jobs, JobEndpoints]:
    """Return the service that runs jobs, to start after all that carries records, and its endpoints."""
    config, admin, clock = context.config, context.admin, context.clock
    audited = context.audited_produce("STREAMING_PRODUCER")
    run_context = RunContext(admin, context.inner_producer.produce, audited, clock)
    replays = Replays(run_context, consumers, internal, producing=config.producer.enabled)
    on_sent = context.audit.produced if context.audit else None
    dead_letter_jobs = DeadLetterJobs(run_context, replays, Origins(internal), on_sent)

    def lease_of(name: str) -> Lease:
        return Lease(config.kafka, admin, name, clock)

    jobs = Jobs(table, lease_of, dead_letter_jobs.make, conflict, clock)
    return jobs, JobEndpoints(jobs, replays, dead_letter_jobs)


def dead_letters(context: ProcessContext, consumers: Mapping[str, RunningConsumer]) -> DeadLetterEndpoints:
    """Return the endpoints of dead letters; those of these consumers can be delivered again."""
    config, admin, clock = context.config, context.admin, context.clock
    produce = context.inner_producer.produce
    redelivery = Redelivery(admin, consumers, produce, clock, socket.gethostname())
    pages = DeadLetterPages(admin, context.codecs, clock, config.reactive_consumers.values())
    return DeadLetterEndpoints(pages, redelivery)
