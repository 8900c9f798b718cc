"""Commands for running consumers: checked against the cluster, then written to the control table.

If one partition of a request is not valid, the whole request is rejected.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ValidationError

from headrace.commands.consumer_control import CommandResponse, ConsumerControl
from headrace.commands.entries import key_of, live_settings
from headrace.consumers.running_consumer import RunningConsumer
from headrace.errors import InvalidRequest, NotFound, OffsetsKeptElsewhere, PartitionNotFound, TopicNotFound
from headrace.kafka.timestamps import milliseconds_of
from headrace.records import TopicPartition
from headrace.runtime import Clock

Reason = Annotated[str, msgspec.Meta(max_length=1000)]


class PartitionsRequest(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Partitions that the consumer reads; without `topic` and `partitions`, all of them."""

    topic: str | None = None
    partitions: list[int] | None = None
    """Needs `topic` if the consumer reads several topics."""
    reason: Reason = ""
    """Shown in the status and in the audit."""


class SeekRequest(PartitionsRequest, forbid_unknown_fields=True, kw_only=True):
    """PartitionsRequest to seek, and the target: exactly one of `to`, `offset` and `time`."""

    to: Literal["earliest", "latest"] | None = None
    offset: int | None = None
    time: int | str | None = None
    """The first record with this timestamp or a later one: milliseconds since the epoch, ISO 8601, or an age (`2h`)."""


class SkipRequest(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Complete one record without a delivery and without a dead letter."""

    partition: int
    offset: int
    reason: Reason
    """Written to the audit."""
    topic: str | None = None
    """Required if the consumer reads several topics."""


class SettingsRequest(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Settings that replace those of the file. Null restores the file's value; an absent setting does not change."""

    rate_records: float | msgspec.UnsetType | None = msgspec.UNSET
    """Maximum records per second in each process; null for no limit."""
    max_records: int | msgspec.UnsetType | None = msgspec.UNSET
    max_bytes: int | msgspec.UnsetType | None = msgspec.UNSET
    linger_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    max_in_flight: int | msgspec.UnsetType | None = msgspec.UNSET


class Commands:
    """Checks commands and writes them to the control table."""

    def __init__(self, control: ConsumerControl, clock: Clock) -> None:
        self._control = control
        self._clock = clock

    async def pause(self, consumer: RunningConsumer, where: PartitionsRequest, by: str) -> None:
        """Pause a consumer or some of its partitions; deliveries in flight finish.

        Raises:
            TopicNotFound, PartitionNotFound: It does not read that.
            KafkaError: See `CompactedTable.put`.
        """
        keys = await self._holds(consumer, where)
        await self._control.table.put_all(dict.fromkeys(keys, self._facts(by, where.reason, "since")))

    async def resume(self, consumer: RunningConsumer, where: PartitionsRequest) -> None:
        """Resume a consumer, or some of its partitions.

        Raises:
            InvalidRequest: The consumer is paused entirely, and the request names partitions.
            TopicNotFound, PartitionNotFound: It does not read that.
            KafkaError: See `CompactedTable.put`.
        """
        await self._control.table.catch_up()  # another process may have paused it just before
        paused = self._control.of(consumer, "hold/")
        if _is_all(where):
            keys: Collection[str] = paused
        elif self._control.hold_of(consumer):
            raise InvalidRequest(
                f"{consumer.name} is paused entirely: resume it entirely, then pause single partitions"
            )
        else:
            keys = [key for key in await self._holds(consumer, where) if key in paused]
        if keys:
            await self._control.table.put_all(dict.fromkeys(keys))

    async def seek(
        self, consumer: RunningConsumer, request: SeekRequest, by: str, wait_seconds: float
    ) -> CommandResponse:
        """Change the offsets at which a group resumes.

        Raises:
            InvalidRequest: The target is missing or not in the log.
            OffsetsKeptElsewhere: The backend keeps the group's offsets.
            TopicNotFound, PartitionNotFound: It does not read that.
            KafkaError: See `CompactedTable.put`.
        """
        member = consumer.pump.seeks.member
        if member and member.keeps_offsets_elsewhere:
            raise OffsetsKeptElsewhere(group=consumer.group)
        partitions = await self._partitions(consumer, request)
        offsets = await self._resolve(consumer, request, partitions)
        return await self._control.command(consumer, "seek", offsets, self._facts(by, request.reason), wait_seconds)

    async def skip(
        self, consumer: RunningConsumer, request: SkipRequest, by: str, wait_seconds: float
    ) -> CommandResponse:
        """Complete one record without a delivery.

        Raises:
            InvalidRequest: The reason is empty, or the record does not exist.
            TopicNotFound, PartitionNotFound: It does not read that.
            KafkaError: See `CompactedTable.put`.
        """
        if not request.reason.strip():
            raise InvalidRequest("reason is empty: a skip requires a reason")
        where = PartitionsRequest(topic=request.topic, partitions=[request.partition])
        (partition, (start, end)), *_ = (await self._partitions(consumer, where, retry_topics=True)).items()
        _check_offset(partition, request.offset, start, end - 1, "has no record")
        facts = self._facts(by, request.reason)
        return await self._control.command(consumer, "skip", {partition: request.offset}, facts, wait_seconds)

    async def change(self, consumer: RunningConsumer, request: SettingsRequest, by: str) -> None:
        """Use other settings from now on; if none is set, use those of the file.

        Raises:
            InvalidRequest: The rules of the file do not allow them.
            KafkaError: See `CompactedTable.put`.
        """
        await self._control.table.catch_up()
        key = key_of("settings/", consumer.name)
        requested = msgspec.structs.asdict(request)
        changed = {**(self._control.table.get(key) or {}), **self._facts(by, "", "since")}
        changed |= {name: value for name, value in requested.items() if value is not msgspec.UNSET}
        is_changed = any(changed.get(name) is not None for name in requested)
        try:
            live_settings(consumer.delivery, changed)
        except ValueError as cause:
            raise InvalidRequest(f"invalid settings for {consumer.name}: {_text_of(cause)}") from cause
        await self._control.table.put(key, changed if is_changed else None)

    def _facts(self, by: str, reason: str, when: str = "at") -> dict[str, Any]:
        return {"by": by, when: self._clock.time(), "reason": reason}

    async def _holds(self, consumer: RunningConsumer, where: PartitionsRequest) -> list[str]:
        if _is_all(where):
            return [key_of("hold/", consumer.name)]
        partitions = await self._partitions(consumer, where, retry_topics=True)
        return [key_of("hold/", consumer.name, *partition) for partition in partitions]

    async def _partitions(
        self, consumer: RunningConsumer, where: PartitionsRequest, *, retry_topics: bool = False
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Return the selected partitions, with the first offset and the end of each."""
        if where.partitions is not None and not where.partitions:
            raise InvalidRequest("partitions is empty: list some, or omit it for all")
        topics = self._control.topics_of(consumer)
        if where.partitions and where.topic is None and len(topics) > 1:
            raise InvalidRequest(f"topic is missing: {consumer.name} reads {', '.join(topics)}")
        if where.topic in consumer.retry_topics and not retry_topics:
            raise InvalidRequest(
                f"{where.topic} is a retry topic of {consumer.name}: its records are delivered when they are due; "
                "skip those that must not be delivered"
            )
        if where.topic is not None and where.topic not in (*topics, *consumer.retry_topics):
            raise TopicNotFound(f"{consumer.name} does not read {where.topic}: it reads {', '.join(topics)}")
        found: dict[TopicPartition, tuple[int, int]] = {}
        for topic in topics if where.topic is None else [where.topic]:
            offsets = await consumer.admin.topic_offsets(topic)
            ends = await consumer.admin.written_offsets(offsets)
            found |= {partition: (start, ends[partition]) for partition, (start, _) in offsets.items()}
        if where.partitions is None:
            return found
        selected = {TopicPartition(each.topic, number) for each in found for number in where.partitions}
        if missing := selected.difference(found):
            raise PartitionNotFound(
                f"partition {', '.join(map(str, sorted(missing)))} does not exist; nothing was done"
            )
        return {partition: offsets for partition, offsets in found.items() if partition in selected}

    async def _resolve(
        self, consumer: RunningConsumer, request: SeekRequest, partitions: Mapping[TopicPartition, tuple[int, int]]
    ) -> dict[TopicPartition, int]:
        if sum(each is not None for each in (request.to, request.offset, request.time)) != 1:
            raise InvalidRequest("set exactly one of to (earliest or latest), offset and time")
        if not partitions:
            raise NotFound(f"{consumer.name} reads no topic yet")
        if request.offset is not None:
            for partition, (start, end) in partitions.items():
                _check_offset(partition, request.offset, start, end, "cannot resume")
            return dict.fromkeys(partitions, request.offset)
        if request.to == "earliest":
            return {partition: start for partition, (start, _) in partitions.items()}
        ends = await consumer.admin.end_offsets(partitions)
        if request.time is None:
            return ends
        milliseconds = milliseconds_of(request.time, self._clock.time())
        if milliseconds > self._clock.time() * 1000:
            raise InvalidRequest(
                f"time {request.time} is in the future: use to: latest to resume after the last record"
            )
        return {**ends, **await consumer.admin.offsets_since(partitions, milliseconds)}


def _is_all(where: PartitionsRequest) -> bool:
    return where.topic is None and where.partitions is None


def _check_offset(partition: TopicPartition, offset: int, start: int, end: int, what: str) -> None:
    if not start <= offset <= end:
        log = f"its log has offsets {start} to {end}" if end >= start else "its log is empty"
        raise InvalidRequest(f"{partition} {what} at offset {offset}: {log}; nothing was done")


def _text_of(cause: ValueError) -> str:
    """Return the first problem in one sentence."""
    if not isinstance(cause, ValidationError):
        return str(cause)
    first = cause.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]
