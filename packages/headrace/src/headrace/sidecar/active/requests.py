"""The bodies and queries of active consumers, under their documented names and those of light-4j's protocol."""

from typing import Annotated, Any, Final, Literal

import msgspec

from headrace.config.kafka import CONSUMER_KEYS
from headrace.kafka.names import check_topic
from headrace.records import Committed, TopicPartition
from headrace.sidecar.active.partition_positions import Processed

MOST_RECORDS: Final = 10_000
_MOST_WAIT_MS: Final = 30_000
_Partition = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 2)]
_FewTopics = msgspec.Meta(max_length=1000)
_FewPartitions = msgspec.Meta(max_length=2000)
"""A topic rarely has more, commits and seeks can be divided, and the loop handles this many in milliseconds."""


def _kafka(name: str) -> Any:
    return msgspec.field(default=None, name=name)


class CreateInstance(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The settings of an instance; names with dots are Kafka's. Numbers and booleans may be text.

    Times have a minimum, because lower ones keep the process or a broker busy for nothing.
    """

    id: str | None = None
    name: str | None = None
    format: str | None = None
    key_format: str | None = None
    value_format: str | None = None
    auto_offset_reset: Literal["earliest", "latest", "none"] | None = None
    reset: Literal["earliest", "latest", "none"] | None = _kafka("auto.offset.reset")
    auto_commit_enable: bool | None = None
    auto_commit: bool | None = _kafka("auto.commit.enable")
    enable_auto_commit: bool | None = _kafka("enable.auto.commit")
    auto_commit_interval: Annotated[int, msgspec.Meta(ge=100)] | None = _kafka("auto.commit.interval.ms")
    response_min_bytes: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)] | None = None
    fetch_min_bytes: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)] | None = _kafka("fetch.min.bytes")
    request_wait_ms: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WAIT_MS)] | None = None
    request_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WAIT_MS)] | None = _kafka(
        "consumer.request.timeout.ms"
    )
    linger_ms: Annotated[int, msgspec.Meta(ge=0, le=_MOST_WAIT_MS)] | None = None
    isolation_level: str | None = _kafka("isolation.level")
    group_protocol: str | None = _kafka("group.protocol")
    group_instance_id: str | None = _kafka("group.instance.id")
    remote_assignor: str | None = _kafka("group.remote.assignor")
    assignors: str | None = _kafka("partition.assignment.strategy")
    session_timeout: int | None = _kafka("session.timeout.ms")
    heartbeat: Annotated[int, msgspec.Meta(ge=500)] | None = _kafka("heartbeat.interval.ms")
    max_poll_interval: int | None = _kafka("max.poll.interval.ms")
    fetch_max_bytes: int | None = _kafka("fetch.max.bytes")
    partition_fetch_bytes: int | None = _kafka("max.partition.fetch.bytes")
    fetch_wait: Annotated[int, msgspec.Meta(ge=10)] | None = _kafka("fetch.max.wait.ms")

    @property
    def membership(self) -> dict[str, Any]:
        """Its Kafka properties of membership and fetching."""
        found: dict[str, Any] = {}
        for field in msgspec.structs.fields(self):
            key = CONSUMER_KEYS.get(field.encode_name)
            value = getattr(self, field.name)
            of_member = key and key.setting.startswith("`consumer.") and field.name != "fetch_min_bytes"
            if key and of_member and value is not None:
                found[key.client] = value
        return found


class Created(msgspec.Struct):
    """The new instance, in both spellings."""

    instance_id: str
    base_uri: str
    camel_id: str = msgspec.field(name="instanceId")
    camel_uri: str = msgspec.field(name="baseUri")
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Settings that are allowed but probably a mistake."""


class Position(msgspec.Struct):
    """An offset of a partition."""

    topic: str
    partition: _Partition
    offset: _Offset
    metadata: Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\x00]*$")] | None = ""
    assignment: Annotated[str, msgspec.Meta(max_length=32)] | msgspec.UnsetType = msgspec.UNSET
    """The record's assignment; an earlier one than the current is refused."""

    def processed(self, following: int = 1) -> Processed:
        """Return how far its client is; `following` is 0 if the offset is already that of the next record.

        Raises:
            InvalidTopicName: It is not a valid topic name.
        """
        partition = TopicPartition(check_topic(self.topic), self.partition)
        at = Committed(self.offset + following, self.metadata or "")
        return Processed(partition, at, self.assignment or "")


class PartitionName(msgspec.Struct):
    """A partition."""

    topic: str
    partition: _Partition


class ExactHeader(msgspec.Struct):
    """A header with its exact value, in base64."""

    name: str
    value: str | None


class Moment(msgspec.Struct):
    """A time in a partition: text of RFC 3339, or milliseconds since the epoch."""

    topic: str
    partition: _Partition
    timestamp: str | int
    metadata: str | None = ""


class CommitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets of the last processed records; without any, what was delivered is committed."""

    offsets: Annotated[list[Position], _FewPartitions] | None = None


class Partitions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Partitions, under either name."""

    partitions: Annotated[list[PartitionName], _FewPartitions] = []
    offsets: Annotated[list[PartitionName], _FewPartitions] = []

    @property
    def all(self) -> list[TopicPartition]:
        """The partitions of both lists."""
        return [TopicPartition(check_topic(one.topic), one.partition) for one in [*self.partitions, *self.offsets]]


class SeekPositions(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets to read next, and times to read from."""

    offsets: Annotated[list[Position], _FewPartitions] = []
    timestamps: Annotated[list[Moment], _FewPartitions] = []


class SubscribeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Topics, or a pattern that matches whole names."""

    topics: Annotated[list[str], _FewTopics] | None = None
    topic_pattern: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None


class Subscribed(msgspec.Struct):
    """The topics of an instance."""

    topics: list[str]


class Assigned(msgspec.Struct):
    """The partitions of an instance."""

    partitions: list[PartitionName]


class CommittedOffsets(msgspec.Struct):
    """Committed offsets: the next records to read."""

    offsets: list[Position]


class ConsumedRecord(msgspec.Struct, rename="camel"):
    """A record in the response of a read. A tombstone has no `value`; undecodable bytes are raw, in base64."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    headers: dict[str, str | None]
    assignment: str | msgspec.UnsetType = msgspec.UNSET
    """Opaque name of the assignment in which an instance read it, for commits, transactions and seeks."""
    key: Any = msgspec.UNSET
    value: Any = msgspec.UNSET
    header_list: list[ExactHeader] | msgspec.UnsetType = msgspec.UNSET
    """All headers, if `headers` cannot represent them exactly."""
    key_format: str | msgspec.UnsetType = msgspec.UNSET
    """With `format=auto`: `schema` with its id, `string`, `binary` (base64) or `null`."""
    value_format: str | msgspec.UnsetType = msgspec.UNSET
    raw_key: str | msgspec.UnsetType = msgspec.UNSET
    raw_value: str | msgspec.UnsetType = msgspec.UNSET
    error_code: str | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET


class CommitQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How to commit."""

    asynchronous: bool = msgspec.field(default=False, name="async")
    """Whether to respond before the commit is acknowledged."""
    show: bool = msgspec.field(default=False, name="offsets")
    """Whether to return the committed offsets."""


class ReadQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Limits of one read; -1 is that of the instance."""

    timeout: Annotated[int, msgspec.Meta(ge=-1, le=_MOST_WAIT_MS)] = -1
    """Longest wait, in milliseconds."""
    max_bytes: Annotated[int, msgspec.Meta(ge=-1)] = -1
    max_bytes_camel: Annotated[int, msgspec.Meta(ge=-1)] = msgspec.field(default=-1, name="maxBytes")
    max_records: Annotated[int, msgspec.Meta(ge=1)] = MOST_RECORDS
    format: str | None = None
    ack: str = ""
    """For a stream: the id of the last event that the client has received, instead of the header Last-Event-ID."""
    delivery: Literal["at_most_once"] | None = None
    """With `at_most_once`, records count as delivered once they are sent."""
