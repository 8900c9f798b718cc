"""The runs of one process: replays, jobs and dead letters, with their endpoints."""

from collections.abc import Sequence

from headrace.commands.command_parts import CommandParts
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.consumers.running_consumer import RunningConsumers
from headrace.kafka import Lease
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace.runs.dead_letter_jobs import DeadLetterJobs
from headrace.runs.dead_letters.origins import Origins
from headrace.runs.dead_letters.pages import DeadLetterPages
from headrace.runs.dead_letters.routes import DeadLetterEndpoints
from headrace.runs.jobs import Jobs
from headrace.runs.replay import RunContext
from headrace.runs.replay_requests import Replays, conflict
from headrace.runs.routes import JobEndpoints
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts


class RunParts(Parts):
    """The service that runs jobs, and the endpoints of jobs and dead letters."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        config, clock = context.config, context.clock
        parts, self._commands = needed.of(ConsumersParts), needed.of(CommandParts)
        dead_letter_jobs = dead_letter_jobs_of(context, parts.running, parts.internal)

        def lease_of(name: str) -> Lease:
            return Lease(config.kafka, context.admin, name, clock)

        self.jobs = Jobs(self._commands.table, lease_of, dead_letter_jobs.make, conflict, clock)
        """Runs the jobs of this process, and shows all."""
        self.replays = dead_letter_jobs.replays
        """Checks requests for replays, and makes them into jobs."""
        pages = DeadLetterPages(context.admin, context.codecs, clock, config)
        self.endpoints = [JobEndpoints(self.jobs, self.replays, dead_letter_jobs), DeadLetterEndpoints(pages)]

    def services(self) -> Sequence[Service]:
        return [self.jobs] if self._commands.is_used else []


def dead_letter_jobs_of(
    context: ProcessContext, consumers: RunningConsumers, internal: InternalTopics
) -> DeadLetterJobs:
    """Return the maker of runs that redrive, move and drop dead letters."""
    run_context = run_context_of(context)
    replays = Replays(run_context, consumers, internal)
    on_sent = context.audit.produced if context.audit else None
    return DeadLetterJobs(run_context, replays, Origins(internal), on_sent)


def run_context_of(context: ProcessContext) -> RunContext:
    """Return what each run of this process uses of Kafka."""
    audited = context.audited_produce("STREAMING_PRODUCER", in_order=True)
    return RunContext(context.admin, context.inner_producer.produce, audited, context.clock)
