"""Replays that are described by the metadata of light-4j kafka-sidecar: checked, then begun as the core's replays."""

import msgspec

from headrace import errors
from headrace.consumers.running_consumer import RunningConsumers
from headrace.runs.jobs import Jobs, JobView
from headrace.runs.replay_requests import ReplayRequest, Replays, ReplayTarget


class ReplayMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The body of `POST /adm/messagereplaymetadata`, as in light-4j kafka-sidecar."""

    topic_name: str = ""
    dlq_indicator: bool = False
    partition: int = -1
    start_offset: int = -1
    end_offset: int = -1
    consumer_group: str = ""
    timeout: int = 0
    streaming_app: bool = False
    destination_topic: str = ""
    last_retry: bool = False


class MetadataReplays:
    """Starts replays by their metadata."""

    def __init__(self, jobs: Jobs, replays: Replays, consumers: RunningConsumers, *, producing: bool) -> None:
        """Prepare; `consumers` are those of this process and may change. Nothing begins unless `producing`."""
        self._jobs = jobs
        self._replays = replays
        self._consumers = consumers
        self._producing = producing

    async def begin(self, metadata: ReplayMetadata, by: str) -> JobView:
        """Start the replay that the metadata describes and return its job.

        Raises:
            ProducerNotEnabled: Producing is off.
            ReplayMetadataInvalid: The request is not valid; the text says why in one line.
            Conflict: It is already running.
        """
        if not self._producing:
            raise errors.ProducerNotEnabled()
        try:
            job = await self._replays.begin(self._jobs, self._as_request(metadata), by)
        except (errors.Conflict, errors.ReplayMetadataInvalid):
            raise
        except errors.RequestError as error:
            raise errors.ReplayMetadataInvalid(error.description) from error
        assert isinstance(job, JobView), "a replay by metadata is never a dry run"
        return job

    def _as_request(self, metadata: ReplayMetadata) -> ReplayRequest:
        topic, group = metadata.topic_name[:249], metadata.consumer_group[:100]
        readers = [each for each in self._consumers.values() if each.reads(metadata.topic_name)]
        chosen = [each for each in readers if each.group == metadata.consumer_group]
        if not any(each.group == metadata.consumer_group for each in self._consumers.values()):
            chosen = readers  # a new group, as light-4j kafka-sidecar advises; it stays unused
        several = len(chosen) > 1 and (metadata.dlq_indicator or not metadata.streaming_app)
        problems = {
            "topicName is missing": not topic,
            "partition must be 0 or greater": metadata.partition < 0,
            "startOffset and endOffset must be 0 or greater": min(metadata.start_offset, metadata.end_offset) < 0,
            "startOffset must be less than endOffset": metadata.start_offset >= metadata.end_offset,
            "consumerGroup is missing": not group,
            f"no consumer here reads topicName {topic}": not readers,
            f"group {group} does not read topicName {topic}": not chosen,
            f"several groups read topicName {topic}: set consumerGroup to one of them": several,
            "destinationTopic is missing, and streamingApp is true": metadata.streaming_app
            and not metadata.destination_topic,
        }
        if problem := next((text for text, holds in problems.items() if holds), ""):
            raise errors.ReplayMetadataInvalid(problem)
        target = chosen[0]
        source = metadata.topic_name
        if metadata.dlq_indicator:
            if target.dead_letters is None:
                raise errors.ReplayMetadataInvalid(f"the group {target.group} has no dead letters")
            source = target.dead_letters.topic_for(source)
        kind = "consumer" if target.kind == "reactive" else "function"
        to = {"topic": metadata.destination_topic} if metadata.streaming_app else {kind: target.name}
        return ReplayRequest(
            topic=source,
            partition=metadata.partition,
            first=metadata.start_offset,
            last=metadata.end_offset - 1,
            to=ReplayTarget(**to),
            last_retry=metadata.last_retry,
        )
