"""Which product wrote a dead letter, and what its headers say, in the words of the history of Headrace."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from headrace.delivery.dead_letter import PREFIX, STACK_TRACE, Origin, iso
from headrace.kafka import Admin, read_window, window
from headrace.records import Header, Record, TopicPartition

RETRY_TOPIC: Final = r".+-retry(-\d+)?"
"""Names of Spring's retry topics."""
_DIGITS: Final = re.compile(rb"-?[0-9]{1,19}")
_PARTITION_BYTES, _LONG_BYTES = 4, 8
_LAST_PARTITION, _LAST_MS = 2**31 - 1, 253_402_300_799_000
_NEAR: Final = 1000
"""Offsets that are read with their neighbours rather than on their own."""


class _ForeignWriter(NamedTuple):
    """The headers of one writer: their common beginning, and the rest of their names."""

    name: str
    prefix: str
    topic: str
    partition: str
    offset: str
    history: str
    """Pattern of all names that the writer adds."""
    timestamp: str = ""
    group: str = ""
    group_prefix: str = ""
    attempts: str = ""
    errors: Sequence[str] = ()
    """Class names; the first that is there counts."""
    messages: Sequence[str] = ()
    stacks: Sequence[str] = ()
    keeps_time: bool = False
    """Whether the dead letter has the timestamp of the record; otherwise that of its writing."""
    copies_headers: bool = True


_SPRING_HISTORY: Final = r"kafka_dlt-.*|kafka_(original|exception|key-exception)-.*|retry_topic-.*"
_SPRING: Final = _ForeignWriter(
    "spring",
    "kafka_dlt-",
    "original-topic",
    "original-partition",
    "original-offset",
    _SPRING_HISTORY,
    timestamp="original-timestamp",
    group="original-consumer-group",
    errors=("exception-cause-fqcn", "exception-fqcn", "key-exception-fqcn"),
    messages=("exception-message", "key-exception-message"),
    stacks=("exception-stacktrace", "key-exception-stacktrace"),
)
_WRITERS: Final = (
    _SPRING,
    # The dead letters of a listener with retry topics; its group has the beginning of the others.
    _SPRING._replace(prefix="kafka_", group="dlt-original-consumer-group"),
    _ForeignWriter(
        "connect",
        "__connect.errors.",
        "topic",
        "partition",
        "offset",
        r"__connect\.errors\..*",
        group="connector.name",
        group_prefix="connect-",
        errors=("exception.class.name",),
        messages=("exception.message",),
        stacks=("exception.stacktrace",),
        keeps_time=True,
    ),
    _ForeignWriter(
        "streams",
        "__streams.errors.",
        "topic",
        "partition",
        "offset",
        r"__streams\.errors\..*",
        errors=("exception",),
        messages=("message",),
        stacks=("stacktrace",),
        keeps_time=True,
        copies_headers=False,
    ),
    _ForeignWriter(
        "share",
        "__dlq.errors.",
        "topic",
        "partition",
        "offset",
        r"__dlq\.errors\..*",
        group="group",
        attempts="delivery.count",
        messages=("message",),
        copies_headers=False,
    ),
    _ForeignWriter(
        "smallrye",
        "dead-letter-",
        "topic",
        "partition",
        "offset",
        r"dead-letter-(topic|partition|offset|reason|cause|(exception|cause)-class-name)",
        errors=("cause-class-name", "exception-class-name"),
        messages=("cause", "reason"),
    ),
)


class _NotRead(ValueError):
    """A header has a value that its writer cannot have written."""


class ForeignReaders:
    """One reader for each writer of the table."""

    def __init__(self) -> None:
        self._histories = {one.prefix: re.compile(rf"{one.history}|headrace\.dlq\..*") for one in _WRITERS}
        self._topics = [(one.prefix + one.topic, one) for one in _WRITERS]

    def read(self, headers: Sequence[Header], timestamp_ms: int) -> Origin | None:
        """Return the history of a record with these headers and this timestamp; None if no reader reads it."""
        # Spring may append: the first position is that of the record, the last failure is the newest.
        first, last = dict(reversed(headers)), dict(headers)
        for name, writer in self._topics:
            if name in first:
                try:
                    return self._origin(writer, first, last, timestamp_ms)
                except _NotRead:
                    return None
        return None

    def _origin(
        self,
        writer: _ForeignWriter,
        first: Mapping[str, bytes | None],
        last: Mapping[str, bytes | None],
        timestamp_ms: int,
    ) -> Origin:
        def text(*names: str) -> str:
            found = (last.get(writer.prefix + name) for name in names if name)
            return next((data for data in found if data), b"").decode("utf-8", "replace")

        def number(name: str, size: int, most: int) -> int:
            return _number(first.get(writer.prefix + name), size, most)

        topic = (first.get(writer.prefix + writer.topic) or b"").decode("utf-8", "replace")
        partition = number(writer.partition, _PARTITION_BYTES, _LAST_PARTITION)
        offset = number(writer.offset, _LONG_BYTES, 2**63 - 1)
        record_ms = timestamp_ms if writer.keeps_time else -1
        if writer.prefix + writer.timestamp in first and writer.timestamp:
            record_ms = _number(first[writer.prefix + writer.timestamp], _LONG_BYTES, _LAST_MS, -1)
        counted = bool(writer.attempts) and writer.prefix + writer.attempts in first
        attempts = number(writer.attempts, _PARTITION_BYTES, _LAST_PARTITION) if counted else 0
        if not topic:
            raise _NotRead
        message, group = text(*writer.messages), text(writer.group)
        reason = message.split("\n", 1)[0]
        error = text(*writer.errors).split(":", 1)[0].strip().rsplit(".", 1)[-1] or reason or "unknown"
        history = {"reason": reason}
        if not writer.keeps_time and 0 <= timestamp_ms <= _LAST_MS:
            history |= dict.fromkeys(("first_failure", "last_failure"), iso(timestamp_ms / 1000))
        return Origin(
            TopicPartition(topic, partition),
            offset,
            record_ms,
            group and writer.group_prefix + group,
            attempts,
            error,
            {
                **{PREFIX + name: data.encode() for name, data in history.items()},
                STACK_TRACE: text(*writer.stacks).encode(),
            },
            writer.name,
            self._histories[writer.prefix],
            _refusal(writer, topic),
        )

    async def originals(
        self, admin: Admin, dead_letters: Sequence[tuple[Record, Origin, Sequence[Header]]]
    ) -> dict[int, Record]:
        """Return the records that dead letters of one partition were, by the offset of the dead letter.

        Left out are those that are no longer there, and those with another value than the copy in the dead letter.
        """
        dead_letters = [one for one in dead_letters if not re.fullmatch(RETRY_TOPIC, one[1].partition.topic)]
        positions = {(origin.partition, origin.offset) for _, origin, _ in dead_letters}
        found: dict[tuple[TopicPartition, int], Record] = {}
        waiting = []
        for topic in {partition.topic for partition, _ in positions}:
            logs, ends = await window(admin, topic)
            waiting += sorted(one for one in positions if one[0] in logs and logs[one[0]] <= one[1] < ends[one[0]])
        while waiting:
            starts: dict[TopicPartition, int] = {}
            stops: dict[TopicPartition, int] = {}
            rest = []
            for partition, offset in waiting:
                if partition in stops and offset > stops[partition] + _NEAR:
                    rest.append((partition, offset))
                    continue
                starts.setdefault(partition, offset)
                stops[partition] = offset + 1
            async with contextlib.aclosing(read_window(admin.config, starts, stops)) as batches:
                async for batch in batches:
                    found.update({at: one for one in batch if (at := (one.topic_partition, one.offset)) in positions})
            waiting = rest
        pairs = ((one, found.get((origin.partition, origin.offset))) for one, origin, _ in dead_letters)
        return {one.offset: record for one, record in pairs if record and one.value in (None, record.value)}


READERS: Final = ForeignReaders()


def _number(data: bytes | None, size: int, most: int, least: int = 0) -> int:
    """Return a number that is written as text, or big endian in so many bytes."""
    if data is None:
        raise _NotRead
    if _DIGITS.fullmatch(data):
        found = int(data)
    elif len(data) == size:
        found = int.from_bytes(data, signed=True)
    else:
        raise _NotRead
    if not least <= found <= most:
        raise _NotRead
    return found


def _refusal(writer: _ForeignWriter, topic: str) -> str:
    if writer.name == "spring" and re.fullmatch(RETRY_TOPIC, topic):
        return f"{topic} is a retry topic of Spring, which counts the attempts"
    if not writer.copies_headers:
        return f"{writer.name} copied no headers: --from-origin reads the records from {topic}, if they are still there"
    return ""
