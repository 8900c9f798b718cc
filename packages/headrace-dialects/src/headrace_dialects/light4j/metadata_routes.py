"""`POST /adm/messagereplaymetadata`: a replay that is described as in light-4j kafka-sidecar."""

from typing import Final

import msgspec

from headrace import errors
from headrace.errors import ReplayMetadataInvalid
from headrace.http.endpoint import ADMINISTER, JSON, KAFKA, Call, CallEvent, Endpoint, caller_name
from headrace.records import Produced
from headrace.runs.jobs import Jobs
from headrace_dialects.light4j.metadata_replays import MetadataReplays, ReplayMetadata

_METADATA: Final = {
    "topicName": "orders",
    "partition": 0,
    "startOffset": 0,
    "endOffset": 100,
    "consumerGroup": "billing",
}


class ReplayAccepted(msgspec.Struct):
    """The response of the light-4j sidecar, with the job. The offset is that of the job in the control topic."""

    offsets: list[Produced]
    request_status: str = msgspec.field(name="requestStatus")
    job_id: str = msgspec.field(name="jobId")


class MetadataEndpoints:
    """Starts replays by their metadata."""

    def __init__(self, jobs: Jobs, replays: MetadataReplays) -> None:
        self._jobs = jobs
        self._replays = replays

    @Endpoint(
        "POST",
        "/adm/messagereplaymetadata",
        "postReplayMetadata",
        "Replay a range of a topic, as in the light-4j sidecar",
        ADMINISTER,
        request={JSON: ReplayMetadata},
        example=_METADATA,
        errors=(*KAFKA, errors.ReplayMetadataInvalid, errors.Conflict, errors.ProducerNotEnabled),
        audited="replay",
        decoded=False,
    )
    async def replay_metadata(self, call: Call[bytes, None]) -> ReplayAccepted:
        try:
            metadata = msgspec.json.decode(call.body or b"{}", type=ReplayMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise ReplayMetadataInvalid(str(cause)[:200].replace("\n", " ")) from cause
        call.event = CallEvent(metadata.topic_name)
        job = await self._replays.begin(metadata, caller_name())
        call.event = CallEvent(f"{metadata.topic_name} as {job.id}")
        return ReplayAccepted([Produced(0, self._jobs.entry_of(job.id))], "OK", job.id)
