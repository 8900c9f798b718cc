"""Recording for the ledgers: generated records, the backend's journal, and the commits of the group.

None of it comes from Headrace: the journal is the backend's, topics and `__consumer_offsets` are the broker's.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.config.kafka import KafkaConfig
from headrace.delivery.dead_letter import origin_of
from headrace.kafka import Admin, read_records
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace_devkit.testing.history import Attempt, Commit, Pushed

OFFSETS_TOPIC = "__consumer_offsets"


def unique_records(topic: str, seed: int, keys: int = 1000) -> Iterator[OutgoingRecord]:
    """Yield records without end, with different values. The most frequent key has about one in log2(keys) of them."""
    chance = random.Random(seed)
    number = 0
    while True:
        # Of a power with a uniform exponent the integer part is k about 1/k as often as it is 1: Zipf's law.
        yield OutgoingRecord(topic, b"k%d" % int(keys ** chance.random()), b"%d-%d" % (seed, number))
        number += 1


class GroupCommit(NamedTuple):
    """One commit as the broker stores it."""

    group: str
    partition: TopicPartition
    commit: Commit


def decode_commit(record: Record) -> GroupCommit | None:
    """Return the commit in a record of `__consumer_offsets`, or None if it is another record or a tombstone.

    Source: Kafka's OffsetCommitKey v1, OffsetCommitValue v4 (the text's size is a varint) and v3 (it is two bytes).
    """
    key, value = record.key or b"", record.value or b""
    if not value or key[:2] not in (b"\x00\x00", b"\x00\x01"):
        return None
    group, at = _text(key, 2, *struct.unpack_from(">h", key, 2))
    topic, at = _text(key, at, *struct.unpack_from(">h", key, at))
    version, offset = struct.unpack_from(">hq", value)
    size, start = _varint(value, 14) if version > 3 else (struct.unpack_from(">h", value, 14)[0] + 1, 16)
    end = start + size - 1
    partition, time_ms = struct.unpack_from(">i", key, at)[0], struct.unpack_from(">q", value, end)[0]
    metadata = value[start:end].decode().removesuffix("\0")  # the client library sends the end of a C string, too
    return GroupCommit(group, TopicPartition(topic, partition), Commit(time_ms / 1000, offset, metadata))


def read_journal(journal: Path) -> dict[TopicPartition, list[Attempt]]:
    """Return every attempt in a backend's journal, by partition, in order of arrival."""
    requests: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    for line in journal.read_bytes().split(b"\n")[:-1]:  # after the last newline is nothing, or an unfinished line
        entry = msgspec.json.decode(line)
        (ends if "ended" in entry else requests)[entry["request"]] = entry
    found: dict[TopicPartition, list[Attempt]] = defaultdict(list)
    for number, request in requests.items():
        end = ends.get(number, {"ended": ()})
        ended = set(end["ended"])
        for index, (delivery_id, key, value) in enumerate(request["records"]):
            _, topic, partition, offset = delivery_id.rsplit(":", 3)
            attempt = Attempt(number, request["at"], int(offset), _encoded(key), _encoded(value))
            if index in ended:
                attempt = attempt._replace(ended_at=end["at"])
            found[TopicPartition(topic, int(partition))].append(attempt)
    return found


async def group_commits(kafka: KafkaConfig, admin: Admin) -> list[GroupCommit]:
    """Return every commit of every group, in the order of the broker."""
    return [found for found in map(decode_commit, await _read(kafka, admin, OFFSETS_TOPIC)) if found]


async def gather(
    kafka: KafkaConfig, admin: Admin, group: str, topic: str, journal: Path, made: Sequence[GroupCommit] = ()
) -> list[Pushed]:
    """Return what is known of a group's deliveries of a topic, by partition; `made` are all commits, if read before."""
    attempts = read_journal(journal)
    commits = by_partition(
        (found.partition, found.commit)
        for found in made or await group_commits(kafka, admin)
        if (found.group, found.partition.topic) == (group, topic)
    )
    dead_letters = by_partition(
        (origin.partition, record)
        for record in await _read(kafka, admin, f"{topic}.dlq")
        if (origin := origin_of(record.headers))
    )
    log = by_partition((record.topic_partition, record) for record in await _read(kafka, admin, topic))
    return [Pushed(log[p], attempts.get(p, []), dead_letters[p], commits[p]) for p in await admin.topic_offsets(topic)]


def by_partition(items: Iterable[tuple[TopicPartition, Any]]) -> dict[TopicPartition, list[Any]]:
    """Return items by partition, each in order of arrival."""
    sorted_in: dict[TopicPartition, list[Any]] = defaultdict(list)
    for partition, item in items:
        sorted_in[partition].append(item)
    return sorted_in


async def _read(kafka: KafkaConfig, admin: Admin, topic: str) -> list[Record]:
    offsets = await admin.topic_offsets(topic)
    starts, ends = {p: start for p, (start, _) in offsets.items()}, {p: end for p, (_, end) in offsets.items()}
    return [record async for batch in read_records(kafka, starts, ends) for record in batch]


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    return data[at + 2 : at + 2 + size].decode(), at + 2 + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
