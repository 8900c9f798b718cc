"""Jobs, and replays as jobs: `/adm/jobs...`, `/adm/replays`, `/adm/messagereplaymetadata`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config.http import HttpConfig
from headrace.control.jobs import Jobs, JobView, Wish
from headrace.control.letter_jobs import Kind, LetterJobs, LettersReport, LettersRequest
from headrace.control.replays import DryRun, ReplayMetadata, ReplayRequest, Replays
from headrace.errors import HeadraceError, ReplayMetadataInvalid
from headrace.records import Produced
from headrace.web.access import who
from headrace.web.bodies import answer, body_of
from headrace.web.exchange import headers_of, read_json

REPLAYS, REPLAY_METADATA = "/adm/replays", "/adm/messagereplaymetadata"
LETTERS = "/adm/dead-letters/{topic}"
JOBS, JOB = "/adm/jobs", "/adm/jobs/{job}"
WISHES: Mapping[str, Wish] = {"pause": "pause", "resume": "run", "stop": "stop"}


class JobList(msgspec.Struct):
    """Every job, the newest first."""

    jobs: list[JobView]


class ReplayAccepted(msgspec.Struct):
    """The answer of the original, and the job. The offset is that of the job in the control topic."""

    offsets: list[Produced]
    request_status: str = msgspec.field(name="requestStatus")
    job_id: str = msgspec.field(name="jobId")


Note = Callable[[str, str, str, str], None]
"""Notes an operation in the audit: action, target, reason, outcome."""


def job_routes(jobs: Jobs, replays: Replays, letters: LetterJobs, settings: HttpConfig, note: Note) -> list[Route]:
    """Return the endpoints."""

    async def noted(action: str, target: str, reason: str, work: Awaitable[Any]) -> Any:
        """Do something, and note in the audit who asked for it and how it ended; a dry run is no deed."""
        try:
            done = await work
        except HeadraceError as error:
            note(action, target, reason or error.description, "FAILURE")
            raise
        if isinstance(done, JobView):
            note(action, target if target == done.id else f"{target} as {done.id}", reason, "SUCCESS")
        return done

    async def list_jobs(request: Request) -> Response:
        return answer(JobList(jobs.list()))

    async def show(request: Request) -> Response:
        return answer(jobs.show(request.path_params["job"]))

    def wish(what: Wish) -> Callable[[Request], Awaitable[Response]]:
        async def work(request: Request) -> Response:
            name = request.path_params["job"]
            return answer(await noted(f"job {what}", name, "", jobs.wish(name, what, who())))

        return work

    async def replay(request: Request) -> Response:
        asked = await body_of(request, ReplayRequest, settings)
        return begun(await noted("replay", asked.topic, "", replays.begin(jobs, asked, who())))

    async def metadata(request: Request) -> Response:
        body = await read_json(request.receive, headers_of(request.scope), settings)
        try:
            asked = msgspec.json.decode(body or b"{}", type=ReplayMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise ReplayMetadataInvalid(str(cause)[:200].replace("\n", " ")) from cause
        job = await noted("replay", asked.topic_name, "", replays.begin_as_seed(jobs, asked, who()))
        return answer(ReplayAccepted([Produced(0, jobs.entry_of(job.id))], "OK", job.id))

    def of_letters(kind: Kind) -> Callable[[Request], Awaitable[Response]]:
        async def work(request: Request) -> Response:
            asked = await body_of(request, LettersRequest, settings)
            topic = request.path_params["topic"]
            return begun(await noted(kind, topic, asked.reason, letters.begin(jobs, kind, topic, asked, who())))

        return work

    kinds: tuple[Kind, ...] = get_args(Kind)
    return [
        *(Route(f"{LETTERS}/{kind}", of_letters(kind), methods=["POST"]) for kind in kinds),
        Route(REPLAYS, replay, methods=["POST"]),
        Route(REPLAY_METADATA, metadata, methods=["POST"]),
        Route(JOBS, list_jobs),
        Route(JOB, show),
        *(Route(f"{JOB}/{verb}", wish(what), methods=["POST"]) for verb, what in WISHES.items()),
    ]


def begun(what: JobView | DryRun | LettersReport) -> Response:
    """Return the answer to a request for a job."""
    return answer(what, 202 if isinstance(what, JobView) else 200)
