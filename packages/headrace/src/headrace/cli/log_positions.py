"""Which records `headrace consume` reads: topics and patterns, partitions, and positions of start and end."""

import re
import time
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

import click

from headrace.cli.options import ParsedType
from headrace.errors import PartitionNotFound, TopicNotFound
from headrace.kafka import Admin, TopicInfo
from headrace.kafka.timestamps import milliseconds, parse_time
from headrace.records import Offsets, TopicPartition

_DIGITS: Final = 18


class LogPosition(NamedTuple):
    """A position in each partition."""

    kind: Literal["earliest", "latest", "offset", "after earliest", "before latest", "time"]
    value: int = 0
    """An offset, a number of records, or milliseconds since the epoch."""


def _position(text: str) -> LogPosition:
    if text in ("earliest", "latest"):
        return LogPosition(text)  # type: ignore[arg-type]
    if found := re.fullmatch(rf"([+-]?)(\d{{1,{_DIGITS}}})", text):
        return LogPosition({"": "offset", "+": "after earliest", "-": "before latest"}[found[1]], int(found[2]))  # type: ignore[arg-type]
    if found := re.fullmatch(rf"s?@(\d{{1,{_DIGITS}}})", text):
        return LogPosition("time", int(found[1]))
    return LogPosition("time", milliseconds(parse_time(text.removeprefix("@"), time.time())))


def _partitions(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise ValueError
    return frozenset(map(int, text.split(",")))


POSITION: Final = ParsedType(
    "position",
    _position,
    "no position: write earliest, latest, an offset (47), +2 (after the first two), -3 (before the last three), "
    "a time (2026-01-31T08:00, or 2h ago) or milliseconds since the epoch (@1767225600000)",
)
PARTITIONS: Final = ParsedType("partitions", _partitions, "no list of partitions: write one (0) or several (0,2)")


def check_pattern(word: str) -> None:
    """Raise click.UsageError if a word begins with `^`, and is not a regular expression."""
    if word.startswith("^"):
        try:
            re.compile(word)
        except re.error as cause:
            raise click.UsageError(f"{word!r} is not a regular expression: {cause}") from None


async def find_topics(admin: Admin, words: Sequence[str]) -> list[TopicInfo]:
    """Return the topics that names and patterns select now, each once.

    Raises:
        TopicNotFound: A topic does not exist, or none matches a pattern.
    """
    found: dict[str, TopicInfo] = {}
    known = await admin.list_topics() if any(word.startswith("^") for word in words) else []
    for word in words:
        matching = [topic for topic in known if re.match(word, topic.name)] if word.startswith("^") else []
        if word.startswith("^") and not matching:
            raise TopicNotFound(f"no topic matches {word}: headrace topics list shows them", topic=word)
        for topic in matching or [await admin.describe_topic(word, "Read")]:
            found[topic.name] = topic
    return list(found.values())


def chosen_partitions(topics: Sequence[TopicInfo], numbers: Collection[int]) -> list[TopicPartition]:
    """Return the partitions of topics with these numbers; all without numbers.

    Raises:
        PartitionNotFound: A topic does not have one of them.
    """
    for topic in topics:
        if missing := sorted({*numbers} - {info.partition for info in topic.partitions}):
            text = f"topic {topic.name} has no partition {missing[0]}: it has 0 to {len(topic.partitions) - 1}"
            raise PartitionNotFound(text, topic=topic.name)
    return [
        TopicPartition(topic.name, info.partition)
        for topic in topics
        for info in topic.partitions
        if not numbers or info.partition in numbers
    ]


class LogBounds(NamedTuple):
    """What partitions hold now."""

    firsts: Offsets
    ends: Offsets

    @classmethod
    async def of(cls, admin: Admin, partitions: Sequence[TopicPartition], isolation: str) -> "LogBounds":
        """Ask Kafka for the first offset of each partition, and its end for this isolation level."""
        ends = admin.end_offsets if isolation == "read_committed" else admin.written_offsets
        return cls(await admin.start_offsets(partitions), await ends(partitions))

    async def at(self, admin: Admin, position: LogPosition) -> Offsets:
        """Return the offset of a position in each partition: at least its first one, at most its end."""
        kind, value = position
        if kind == "time":
            found = await admin.offsets_since(self.ends, value)
            requested = {p: found.get(p, end) for p, end in self.ends.items()}
        elif kind in ("latest", "before latest"):
            requested = {p: end - value for p, end in self.ends.items()}
        elif kind in ("earliest", "after earliest"):
            requested = {p: first + value for p, first in self.firsts.items()}
        else:
            requested = dict.fromkeys(self.ends, value)
        return {p: min(max(self.firsts[p], offset), self.ends[p]) for p, offset in requested.items()}
