"""Endpoints of jobs, and of replays and dead letter runs, which start jobs."""

from typing import Any, Final

import msgspec

from headrace import errors
from headrace.http.endpoint import ADMINISTER, KAFKA, Call, CallEvent, Endpoint, Errors, caller_name
from headrace.http.messages import HttpResponse
from headrace.runs.dead_letter_jobs import DeadLetterJobRequest, DeadLetterJobs, DryRunReport
from headrace.runs.jobs import DesiredState, Jobs, JobView
from headrace.runs.replay_requests import DryRun, ReplayRequest, Replays

JOBS: Final = "/adm/jobs"
JOB: Final = JOBS + "/{job}"
DEAD_LETTERS: Final = "/adm/dead-letters/{topic}"
_BEGIN: Final[Errors] = (*KAFKA, errors.NotFound, errors.Conflict)
_KNOWN: Final[Errors] = (errors.NotFound, errors.KafkaUnavailable)
_CHANGE: Final[Errors] = (*_KNOWN, errors.PathNotFound, errors.Conflict, *KAFKA)
_DESIRED: Final[dict[str, DesiredState]] = {"pause": "pause", "resume": "run", "stop": "stop"}
_SELECTION: Final = {"errors": ["HTTP 400"], "dryRun": True}


class JobList(msgspec.Struct):
    """Every job, the newest first."""

    jobs: list[JobView]


class JobEndpoints:
    """Starts jobs, shows them, and pauses, resumes or stops them."""

    def __init__(self, jobs: Jobs, replays: Replays, dead_letters: DeadLetterJobs) -> None:
        self._jobs = jobs
        self._replays = replays
        self._dead_letters = dead_letters

    @Endpoint(
        "POST",
        "/adm/replays",
        "postReplay",
        "Replay a range of a topic",
        ADMINISTER,
        {200: DryRun, 202: JobView},
        example={
            "topic": "orders",
            "partition": 0,
            "first": 0,
            "last": 99,
            "to": {"consumer": "billing"},
            "dryRun": True,
        },
        errors=_BEGIN,
        audited="replay",
    )
    async def replay(self, call: Call[ReplayRequest, None]) -> HttpResponse:
        call.event = CallEvent(call.body.topic)
        return _begun(call, await self._replays.begin(self._jobs, call.body, caller_name()))

    @Endpoint(
        "POST",
        f"{DEAD_LETTERS}/redrive",
        "redriveLetters",
        "Send dead letters back to their origin or to another destination",
        ADMINISTER,
        {200: DryRunReport, 202: JobView},
        example=_SELECTION,
        errors=_BEGIN,
        audited="redrive",
    )
    async def redrive(self, call: Call[DeadLetterJobRequest, None]) -> HttpResponse:
        topic, kind = call.parameters["topic"], call.request.head.route.endpoint.audited
        call.event = CallEvent(topic, call.body.reason)
        return _begun(call, await self._dead_letters.begin(self._jobs, kind, topic, call.body, caller_name()))

    drop = redrive.at(
        "POST",
        f"{DEAD_LETTERS}/drop",
        "dropLetters",
        summary="Drop dead letters",
        example={**_SELECTION, "reason": "test data"},
        audited="drop",
    )
    quarantine = redrive.at(
        "POST",
        f"{DEAD_LETTERS}/quarantine",
        "quarantineLetters",
        summary="Move dead letters to the quarantine topic",
        audited="quarantine",
    )

    @Endpoint("GET", JOBS, "getJobs", "Every job", ADMINISTER, errors=(errors.KafkaUnavailable,))
    async def list(self, call: Call[None, None]) -> JobList:
        return JobList(self._jobs.list())

    @Endpoint("GET", JOB, "getJob", "State and progress of a job", ADMINISTER, errors=_KNOWN)
    async def show(self, call: Call[None, None]) -> JobView:
        return self._jobs.show(call.parameters["job"])

    @Endpoint(
        "POST",
        f"{JOB}/{{action}}",
        "changeJob",
        "Pause, resume or stop a job",
        ADMINISTER,
        errors=_CHANGE,
        audited="job",
    )
    async def change(self, call: Call[None, None]) -> JobView:
        job, action = call.parameters["job"], call.action(*_DESIRED)
        call.event = CallEvent(job, detail=_DESIRED[action])
        return await self._jobs.change(job, _DESIRED[action], caller_name())


def _begun(call: Call[Any, Any], begun: JobView | DryRun | DryRunReport) -> HttpResponse:
    """Return the response to a request for a job. A dry run is not audited."""
    if not isinstance(begun, JobView):
        call.event = None
        return HttpResponse(begun)
    assert call.event
    call.event = call.event._replace(target=f"{call.event.target} as {begun.id}")
    return HttpResponse(begun, 202)
