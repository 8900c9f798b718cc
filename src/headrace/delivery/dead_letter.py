"""What a dead letter looks like, and writing it so that nothing is lost on the way.

Key, value and the record's own headers stay byte for byte; the history is in headers of our own (decisions.md 9).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.delivery.protocols import DeadLetter
from headrace.errors import DeadLetterFailed, HeadraceError
from headrace.records import Header, OutgoingRecord, TopicPartition

PREFIX = "headrace.dlq."
STACK_TRACE = "StackTrace"
REDRIVE_COUNT = "headrace.redrive.count"
REDRIVE_OF = "headrace.redrive.of"
"""`topic:partition:offset` of the record a redriven one was first, so its deliveries keep their identity."""
_REASON_BYTES = 1024
_STACK_BYTES = 8192


class Origin(msgspec.Struct, frozen=True):
    """What the headers of a dead letter say of its history."""

    partition: TopicPartition
    offset: int
    timestamp_ms: int
    group: str
    attempts: int
    first_failure: str
    """ISO 8601, UTC."""
    last_failure: str
    """ISO 8601, UTC."""
    error: str
    reason: str


def headers_of(letter: DeadLetter) -> list[Header]:
    """Return the record's own headers followed by its history."""
    record = letter.record
    history = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp_ms),
        "group": letter.group,
        "attempts": str(letter.attempts),
        "first_failure": _iso(letter.first_failed_at),
        "last_failure": _iso(letter.last_failed_at),
        "error": letter.outcome.error,
        "reason": letter.outcome.reason.split("\n", 1)[0],
        **dict(letter.outcome.details),
    }
    ours: list[Header] = [(PREFIX + name, text.encode()[:_REASON_BYTES]) for name, text in history.items()]
    return [*own_headers(record.headers), *ours, (STACK_TRACE, letter.outcome.reason.encode()[:_STACK_BYTES])]


def origin_of(headers: Sequence[Header]) -> Origin | None:
    """Return the history a dead letter carries, or None if the record is no dead letter of ours."""
    found = {name[len(PREFIX) :]: (value or b"").decode(errors="replace") for name, value in headers if _is_ours(name)}
    try:
        return Origin(
            TopicPartition(found["topic"], int(found["partition"])),
            int(found["offset"]),
            int(found["timestamp"]),
            found["group"],
            int(found["attempts"]),
            found["first_failure"],
            found["last_failure"],
            found["error"],
            found["reason"],
        )
    except (KeyError, ValueError):
        return None


def own_headers(headers: Sequence[Header]) -> list[Header]:
    """Return the headers without an earlier history of ours: what the record had when it was produced."""
    if not any(_is_ours(name) for name, _ in headers):
        return list(headers)
    return [header for header in headers if not _is_ours(header[0]) and header[0] != STACK_TRACE]


class DeadLetterTopic:
    """Writes dead letters to topics named after their origin, and waits for every acknowledgement."""

    def __init__(
        self,
        topic: str,
        produce: Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Any]]],
        ensure: Callable[[str, str], Awaitable[None]] | None,
    ) -> None:
        """Prepare the writer.

        Args:
            topic: Name of the dead letter topic; `{topic}` in it is the origin's name.
            produce: Writes records; an error stands in the place of each that failed.
            ensure: Creates a dead letter topic like the origin named second; None leaves creation to others.
        """
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
            HeadraceError: Kafka did not answer or refused.
        """
        name = self.topic_for(origin)
        if name not in self._known and name != origin:
            if self._ensure:
                await self._ensure(name, origin)
            self._known.add(name)

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        """Write letters; see `DeadLetterWriter`."""
        try:
            for origin in {letter.record.topic for letter in letters}:
                await self.prepare(origin)
            results = await self._produce([self._outgoing(letter) for letter in letters])
        except HeadraceError as cause:
            raise DeadLetterFailed(f"dead letters of {letters[0].record.topic} are not written: {cause}") from cause
        failed = [result for result in results if isinstance(result, HeadraceError)]
        if failed:
            raise DeadLetterFailed(f"{len(failed)} of {len(letters)} dead letters are not written: {failed[0]}")

    def _outgoing(self, letter: DeadLetter) -> OutgoingRecord:
        record = letter.record
        return OutgoingRecord(self.topic_for(record.topic), record.key, record.value, headers_of(letter))


def _is_ours(name: str) -> bool:
    return name.startswith(PREFIX)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
