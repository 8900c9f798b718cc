"""Replays and jobs of one process, bound to what they need."""

from __future__ import annotations

from headrace.app.control_room import Controls
from headrace.app.noting import noted_produce
from headrace.app.ways_in import Surroundings, WaysIn
from headrace.control.jobs import Jobs
from headrace.control.letter_jobs import LetterJobs
from headrace.control.origins import Origins
from headrace.control.replay_run import Place
from headrace.control.replays import Replays, conflict
from headrace.kafka import Lease
from headrace.web.application import Routes
from headrace.web.routes.jobs import job_routes


def jobs_of(process: Surroundings, controls: Controls, ways_in: WaysIn) -> tuple[Jobs, Routes]:
    """Return the service that runs jobs, to start after all that carries records, and its endpoints."""
    config, admin, clock = process.config, process.admin, process.clock
    produce = process.inner_producer.produce
    noted = noted_produce(process.audit, produce, "STREAMING_PRODUCER")
    place = Place(config.kafka, admin, produce, noted, clock)
    replays = Replays(place, ways_in.targets, ways_in.internal, producing=config.producer.enabled)

    letters = LetterJobs(config.kafka, admin, process.inner_producer, clock, replays, Origins(ways_in.internal))
    letters.on_sent = process.audit.sent if process.audit else None

    def lease_of(name: str) -> Lease:
        return Lease(config.kafka, admin, name, clock)

    jobs = Jobs(controls.table, lease_of, letters.make, conflict, clock)
    return jobs, job_routes(jobs, replays, letters, config.http, controls.room.note)
