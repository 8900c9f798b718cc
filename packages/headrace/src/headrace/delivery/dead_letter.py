"""What a dead letter contains, and writing it so that nothing is lost.

Key, value and the record's own headers stay byte for byte; the history is in headers of Headrace.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from headrace.delivery.outcomes import DeadLetter
from headrace.errors import (
    DeadLetterFailed,
    HeadraceError,
    InvalidRequest,
    KafkaUnauthorized,
    RecordRefused,
    RecordTooLarge,
)
from headrace.records import Header, OutgoingRecord, Produce, Record, TopicPartition
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)

REFUSALS: Final = RecordTooLarge, RecordRefused
"""Errors of one record: Kafka would reject it again, and takes the others."""

PREFIX = "headrace.dlq."
STACK_TRACE = "StackTrace"
REDRIVE_COUNT = "headrace.redrive.count"
"""How often a record was redriven."""
MAX_REDRIVES = 5
"""By default a record that was redriven this often is not redriven again."""
REDRIVE_OF = "headrace.redrive.of"
"""`topic:partition:offset` of the first record in a chain of redrives, so that deliveries keep their identity."""
_COUNT_DIGITS = 10
_REASON_BYTES = 1024
_STACK_BYTES = 8192
_GIVES_WAY = (STACK_TRACE, f"{PREFIX}reason", f"{PREFIX}excerpt")
"""Headers that a dead letter leaves out, one after the other, while it is too large; then all headers of Headrace."""


class Origin(msgspec.Struct, frozen=True):
    """The history in the headers of a dead letter; `text` decodes the parts that are seldom needed."""

    partition: TopicPartition
    offset: int
    timestamp_ms: int
    group: str
    attempts: int
    error: str
    headers: Mapping[str, bytes | None] = {}
    """All headers of the dead letter, the last one of each name; of another writer, as Headrace would name them."""
    writer: str = "headrace"
    """The product that wrote the dead letter."""
    history: re.Pattern[str] | None = None
    """Names of the headers that another writer adds."""
    refusal: str = ""
    """Why a dead letter of another writer may not go back as it is; empty if it may."""

    def text(self, name: str) -> str:
        """Return another part of the history, empty if there is none.

        Args:
            name: `first_failure` and `last_failure` (ISO 8601, UTC); `reason`; `status` and `excerpt`, the first KiB,
                of the last response that blamed the record; `key`, `correlation_id`, `traceability_id` and
                `result_timestamp` of the destination's result.
        """
        return (self.headers.get(PREFIX + name) or b"").decode("utf-8", "replace")

    def own_headers(self, headers: Sequence[Header]) -> list[Header]:
        """Return those headers of its dead letter that the record had when it was produced."""
        if self.history:
            return [header for header in headers if not self.history.fullmatch(header[0])]
        return [] if self.headers.keys() <= _HISTORY else own_headers(headers)


_PREFIX_LENGTH = len(PREFIX)
_TOPIC, _GROUP, _ERROR, _PARTITION, _OFFSET, _TIMESTAMP, _ATTEMPTS = (
    PREFIX + name for name in ("topic", "group", "error", "partition", "offset", "timestamp", "attempts")
)
_TIMES = {PREFIX + name for name in ("first_failure", "last_failure")}
_HISTORY = _TIMES | {_TOPIC, _GROUP, _ERROR, _PARTITION, _OFFSET, _TIMESTAMP, _ATTEMPTS, STACK_TRACE}
_HISTORY |= {PREFIX + name for name in ("reason", "status", "excerpt")}
"""Headers that most dead letters have, and nothing else if their record had none."""


def headers_of(dead_letter: DeadLetter, left_out: int = 0) -> list[Header]:
    """Return the record's own headers and its history; `left_out` parts are omitted to make it smaller."""
    record, reply = dead_letter.record, dead_letter.reply
    own = own_headers(record.headers)
    if left_out > len(_GIVES_WAY):
        return own
    history = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp_ms),
        "group": dead_letter.group,
        "attempts": str(dead_letter.attempts),
        "first_failure": iso(dead_letter.first_failed_at),
        "last_failure": iso(dead_letter.last_failed_at),
        "error": reply.error,
        "reason": reply.reason.split("\n", 1)[0],
        **dict(reply.details),
    }
    if reply.status is not None:
        history |= {"status": str(reply.status), "excerpt": reply.reason}
    history_headers: list[Header] = [(PREFIX + name, _cut(text, _REASON_BYTES)) for name, text in history.items()]
    history_headers.append((STACK_TRACE, _cut(reply.stack or reply.reason, _STACK_BYTES)))
    return own + [header for header in history_headers if header[0] not in _GIVES_WAY[:left_out]]


def origin_of(headers: Sequence[Header]) -> Origin | None:
    """Return the history a dead letter carries, or None if Headrace did not write it."""
    found = dict(headers)
    if not found.keys() >= _TIMES:
        return None
    try:
        return Origin(
            TopicPartition((found[_TOPIC] or b"").decode("utf-8", "replace"), int(found[_PARTITION] or b"")),
            int(found[_OFFSET] or b""),
            int(found[_TIMESTAMP] or b""),
            (found[_GROUP] or b"").decode("utf-8", "replace"),
            int(found[_ATTEMPTS] or b""),
            (found[_ERROR] or b"").decode("utf-8", "replace"),
            found,
        )
    except (KeyError, ValueError):
        return None


def own_headers(headers: Sequence[Header]) -> list[Header]:
    """Return the headers without Headrace's history: those that the record had when it was produced."""
    own = [header for header in headers if header[0][:_PREFIX_LENGTH] != PREFIX]
    return own if len(own) == len(headers) else [header for header in own if header[0] != STACK_TRACE]


def redriven_count(headers: Sequence[Header]) -> int:
    """Return how often a record with these headers was redriven."""
    for name, value in headers:
        if name == REDRIVE_COUNT:
            return int(value) if value and value.isdigit() and len(value) < _COUNT_DIGITS else 0
    return 0


def redriven_headers(own: Sequence[Header], origin: Origin) -> list[Header]:
    """Return the headers of a redriven record: its own, the number of redrives, and which record it was first."""
    first, count = f"{origin.partition.topic}:{origin.partition.partition}:{origin.offset}".encode(), b"1"
    kept = []
    for header in own:
        name, value = header
        if name == REDRIVE_OF:
            first = value or first
        elif name == REDRIVE_COUNT:
            count = b"%d" % (redriven_count([header]) + 1)
        else:
            kept.append(header)
    return [*kept, (REDRIVE_COUNT, count), (REDRIVE_OF, first)]


def restored(dead_letter: Record) -> Record:
    """Return a dead letter as the original record: its offset, its time, and the headers of a redriven one.

    So its delivery has the identity of the first one, even after several redrives.

    Raises:
        InvalidRequest: The record is not a dead letter.
    """
    origin = origin_of(dead_letter.headers)
    if origin is None:
        what = f"record {dead_letter.offset} of {dead_letter.topic_partition} is not a dead letter of Headrace"
        raise InvalidRequest(f"{what}: name a dead letter topic", topic=dead_letter.topic)
    own = redriven_headers(own_headers(dead_letter.headers), origin)
    partition, time_ms = origin.partition, origin.timestamp_ms
    size = dead_letter.size_bytes
    return Record(
        partition.topic, partition.partition, origin.offset, time_ms, dead_letter.key, dead_letter.value, own.copy, size
    )


async def write_all(produce: Produce, records: Sequence[OutgoingRecord], what: str) -> Sequence[Any]:
    """Write records and return their partitions and offsets.

    Raises:
        DeadLetterFailed: At least one is not acknowledged.
        KafkaUnauthorized: The process has no right to write them.
    """
    try:
        results = await produce(records)
        if failed := next((result for result in results if isinstance(result, HeadraceError)), None):
            raise failed
    except HeadraceError as cause:
        kind = KafkaUnauthorized if isinstance(cause, KafkaUnauthorized) else DeadLetterFailed
        raise kind(f"failed to write {what} to {records[0].topic}: {cause}") from cause
    return results


class DeadLetterTopic:
    """Writes dead letters to topics named after their origin, and waits for every acknowledgement."""

    def __init__(self, topic: str, produce: Produce, ensure: Callable[[str, str], Awaitable[None]] | None) -> None:
        """Prepare; `{topic}` in `topic` is the origin's name. Without `ensure` others create dead letter topics."""
        self._topic = topic
        self._produce = produce
        self._ensure = ensure
        self._known: set[str] = set()

    def topic_for(self, origin: str) -> str:
        """Return the dead letter topic of a topic; a record from there stays there if it fails again."""
        fixed = self._topic.replace("{topic}", "")
        return origin if fixed and origin.endswith(fixed) else self._topic.replace("{topic}", origin)

    async def prepare(self, origin: str) -> None:
        """Create the dead letter topic of a topic if it is missing and may be created.

        Raises:
            HeadraceError: Kafka did not respond, or rejected it.
        """
        name = self.topic_for(origin)
        if name not in self._known and name != origin:
            if self._ensure:
                await self._ensure(name, origin)
            self._known.add(name)

    def forget(self) -> None:
        """Check again before the next write that the topics exist: one may have been deleted."""
        self._known.clear()

    async def write(self, dead_letters: Sequence[DeadLetter]) -> None:
        """Write dead letters; see `DeadLetterWriter`."""
        origin = dead_letters[0].record.topic
        try:
            for topic in {dead_letter.record.topic for dead_letter in dead_letters}:
                await self.prepare(topic)
            results = await self._produce([self._outgoing(dead_letter) for dead_letter in dead_letters])
            failed = {index: result for index, result in enumerate(results) if isinstance(result, HeadraceError)}
            for index in [index for index, result in failed.items() if isinstance(result, RecordTooLarge)]:
                if problem := await self._write_shorter(dead_letters[index]):
                    failed[index] = problem
                else:
                    del failed[index]
        except HeadraceError as cause:
            raise DeadLetterFailed(f"failed to write dead letters of {origin}: {cause}") from cause
        if failed:
            self._known.clear()
            topic = self.topic_for(origin)
            why = next(iter(failed.values()))
            text = f"failed to write {len(failed)} of {len(dead_letters)} dead letters of {origin} to {topic}: {why}"
            raise DeadLetterFailed(text, missing=[*failed])

    async def _write_shorter(self, dead_letter: DeadLetter) -> HeadraceError | None:
        """Write a dead letter that is too large, with as much of its history as fits; return the error if it failed."""
        record = dead_letter.record
        for left_out in range(1, len(_GIVES_WAY) + 2):
            (result,) = await self._produce([self._outgoing(dead_letter, left_out)])
            if not isinstance(result, RecordTooLarge):
                break
        if isinstance(result, HeadraceError):
            return result
        if left_out > len(_GIVES_WAY):
            what = f"offset {record.offset} (attempts={dead_letter.attempts}, {dead_letter.reply.error})"
            why = f"{self.topic_for(record.topic)} rejects records of that size; raise its max.message.bytes"
            label = f"group {dead_letter.group}, {record.topic_partition}"
            fields = record_fields(dead_letter.group, record.topic_partition, record=record)
            log.warning(
                "%s: the dead letter of %s has no headrace.dlq headers, because %s", label, what, why, extra=fields
            )
        return None

    def _outgoing(self, dead_letter: DeadLetter, left_out: int = 0) -> OutgoingRecord:
        record = dead_letter.record
        return OutgoingRecord(self.topic_for(record.topic), record.key, record.value, headers_of(dead_letter, left_out))


def _cut(text: str, size_bytes: int) -> bytes:
    """Return the text as UTF-8, cut between two characters."""
    data = text.encode(errors="replace")
    return data if len(data) <= size_bytes else data[:size_bytes].decode(errors="ignore").encode()


def iso(seconds: float) -> str:
    """Return seconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
