"""What the endpoints of jobs and replays take and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace import errors
from headrace.control.jobs import JobView
from headrace.control.letter_jobs import LettersReport, LettersRequest
from headrace.control.replays import DryRun, ReplayMetadata, ReplayRequest
from headrace.web.operation import JSON, KAFKA, OWN_BODY, Errors, Operation
from headrace.web.routes.jobs import JOB, JOBS, LETTERS, REPLAY_METADATA, REPLAYS, JobList, ReplayAccepted

_KNOWN: Final[Errors] = (errors.NotFound, errors.KafkaUnavailable)
_WISH: Final[Errors] = (*_KNOWN, errors.JobConflict, *KAFKA)


def _of_letters(name: str, summary: str, example: Mapping[str, str]) -> Operation:
    return Operation(
        name,
        summary,
        {200: LettersReport, 202: JobView},
        request={JSON: LettersRequest},
        example={"errors": ["HTTP 400"], "dryRun": True, **example},
        errors=(*OWN_BODY, *KAFKA, errors.NotFound, errors.JobConflict),
    )


JOB_OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("POST", REPLAYS): Operation(
        "postReplay",
        "Deliver a window of a topic once more",
        {200: DryRun, 202: JobView},
        request={JSON: ReplayRequest},
        example={
            "topic": "orders",
            "partition": 0,
            "offsets": {"start": 0, "end": 100},
            "to": {"consumer": "billing"},
            "dryRun": True,
        },
        errors=(*OWN_BODY, *KAFKA, errors.NotFound, errors.JobConflict),
    ),
    ("POST", REPLAY_METADATA): Operation(
        "postReplayMetadata",
        "Deliver a window of a topic once more, as the original takes it",
        {200: ReplayAccepted},
        request={JSON: ReplayMetadata},
        example={
            "topicName": "orders",
            "partition": 0,
            "startOffset": 0,
            "endOffset": 100,
            "consumerGroup": "billing",
        },
        errors=(*OWN_BODY, *KAFKA, errors.ReplayMetadataInvalid, errors.JobConflict, errors.ProducerNotEnabled),
    ),
    ("POST", f"{LETTERS}/redrive"): _of_letters("redriveLetters", "Send dead letters back, or elsewhere", {}),
    ("POST", f"{LETTERS}/drop"): _of_letters("dropLetters", "Give dead letters up", {"reason": "test data"}),
    ("POST", f"{LETTERS}/quarantine"): _of_letters("quarantineLetters", "Move dead letters aside", {}),
    ("GET", JOBS): Operation("getJobs", "Every job", {200: JobList}, errors=(errors.KafkaUnavailable,)),
    ("GET", JOB): Operation("getJob", "How far a job is", {200: JobView}, errors=_KNOWN),
    ("POST", f"{JOB}/pause"): Operation("pauseJob", "Pause a job", {200: JobView}, errors=_WISH),
    ("POST", f"{JOB}/resume"): Operation("resumeJob", "Let a paused job go on", {200: JobView}, errors=_WISH),
    ("POST", f"{JOB}/stop"): Operation("stopJob", "End a job for good", {200: JobView}, errors=_WISH),
}
"""By method and path."""
