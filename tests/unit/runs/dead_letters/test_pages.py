"""Dead letters in pages: every letter once whatever the gaps, limits that hold, and keys and values decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.model import HeadraceConfig
from headrace.delivery.dead_letter import Origin, headers_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.errors import InvalidRequest, RegistryUnavailable, TooManyRequests
from headrace.formats.choice import Codecs
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.kafka.timestamps import moment
from headrace.records import Header, Record, TopicPartition
from headrace.runs.dead_letters import pages
from headrace.runs.dead_letters.counts import DeadLetterTopics
from headrace.runs.dead_letters.pages import (
    DeadLetterPages,
    DeadLetterReader,
    FoundDeadLetter,
    Order,
    Scan,
    ScanOptions,
    parsed,
)
from headrace.runs.selection import Selection
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

Log = Mapping[int, Sequence[int]]
"""Partition to the offsets that have a letter."""


def headers(error: str = "ValueError") -> list[Header]:
    outcome = Reply(error, "Too LATE for it")
    return headers_of(DeadLetter(Record("t", 0, 7, 5, None, None), "g", 3, outcome, 1.0, 2.0))


def letter_at(partition: int, offset: int, foreign: bool = False, size: int = 1) -> Record:
    own = [] if foreign else headers("HTTP 500" if offset % 2 else "ValueError")
    return Record("t.dlq", partition, offset, offset * 10 + partition, None, b"v", lambda: own, size)


class Cluster(MemoryCluster):
    """One topic: every partition has offsets 0 to its end, and records at some of them; a third has ended."""

    def __init__(self, log: Log, ends: Mapping[int, int]) -> None:
        super().__init__({"t.dlq": max(ends) + 1})
        self.ends = ends
        self.rounds: list[int] = []
        self.fill(log)

    def fill(self, log: Log, foreign: Collection[int] = (), size: int = 1) -> None:
        """Have these letters, and no others."""
        self.empty()
        for partition, offsets in log.items():
            for offset in offsets:
                self.append(letter_at(partition, offset, offset in foreign, size))
        for partition, end in self.ends.items():
            self.log("t.dlq", partition).end = end

    async def load(self) -> None:
        """Nothing to load."""

    async def read_window(self, kafka: KafkaConfig, starts: Any, ends: Any) -> AsyncGenerator[list[Record], None]:
        self.rounds.append(0)
        async for batch in super().read_window(kafka, starts, ends):
            for record in batch:
                self.rounds[-1] += 1
                yield [record]

    def is_completed(self, partition: int, offset: int) -> bool:
        return offset % 3 == 0

    def first_left(self, partition: int, start: int, end: int) -> int:
        return min(start + (start % 3 == 0), end)


async def page_of(
    cluster: Cluster, options: ScanOptions, most: int, selection: Selection | None = None
) -> tuple[list[tuple[int, int]], Scan]:
    scan = Scan(cast(Any, cluster), "t.dlq", cast(Any, cluster), ManualClock(), options)
    found = []
    async for record, _, _ in scan.dead_letters(selection or Selection()):
        found.append((record.partition, record.offset))
        if len(found) == most:
            break
    return found, scan


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    ends = draw(st.dictionaries(st.integers(0, 3), st.integers(0, 40), min_size=1))
    log = {p: sorted(draw(st.sets(st.integers(0, end - 1)))) if end else [] for p, end in ends.items()}
    return Cluster(log, ends)


@given(clusters(), st.sampled_from(["newest", "oldest"]), st.integers(1, 9), st.integers(1, 9), st.integers(1, 60))
def test_pages_hold_every_letter_once_and_in_order(
    cluster: Cluster, order: Order, most: int, limit: int, first_round: int
) -> None:
    """Whatever is compacted away, however small pages and scans are; and the cursor ends with the log."""
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        cursor, step = "", 0
        while step == 0 or cursor:
            found, scan = await page_of(cluster, ScanOptions(order, cursor, limit_records=limit), most)
            assert scan.scanned <= limit + len(cluster.ends)
            seen.extend(found)
            assert cursor != scan.cursor or not cursor
            cursor, step = scan.cursor, step + 1

    with pytest.MonkeyPatch.context() as patch:
        cluster.read_by(patch, pages)
        patch.setattr(pages, "_FIRST_ROUND", first_round)
        asyncio.run(main())
    assert sorted(seen) == sorted((p, record.offset) for p in cluster.ends for record in cluster.records("t.dlq", p))
    for partition in range(4):
        own = [offset for at, offset in seen if at == partition]
        assert own == sorted(own, reverse=order == "newest")


LOG = {0: range(0, 400, 2), 1: range(300)}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(LOG, {0: 400, 1: 300})
    made.read_by(monkeypatch, pages)
    return made


def test_time_ends_a_scan_behind_a_round(cluster: Cluster) -> None:
    """Never before it has come on, so a reader with a cursor always does."""
    _, scan = asyncio.run(page_of(cluster, ScanOptions(limit_seconds=0.0), 1000))
    assert scan.scanned == 0
    clock = ManualClock()
    clock.monotonic = iter(range(100)).__next__  # type: ignore[method-assign]
    scan = Scan(cast(Any, cluster), "t.dlq", cast(Any, cluster), clock, ScanOptions(limit_seconds=1.5))

    async def main() -> None:
        async for _ in scan.dead_letters(Selection()):
            pass

    asyncio.run(main())
    assert 0 < scan.scanned < 500
    assert scan.cursor


@pytest.mark.parametrize("cursor", ["newest.0-1", "oldest.0-1.", "oldest.0", "0:1", "oldest.0-1" + "1" * 30])
def test_cursors_that_are_not_valid(cursor: str) -> None:
    """Of the other order, cut off, or made up."""
    with pytest.raises(InvalidRequest, match="cursor"):
        parsed(cursor, "oldest")


class Registry(SchemaRegistry):
    """Has the schema 2, does not respond for others, and counts these requests."""

    refused = 0

    async def by_id(self, schema_id: int) -> Any:
        if schema_id == 2:
            schema = '{"type":"record","name":"R","fields":[{"name":"n","type":"int"}]}'
            return RegisteredSchema(schema_id, "AVRO", schema)
        self.refused += 1
        raise RegistryUnavailable("away")


@pytest.mark.parametrize(
    ("data", "wanted", "format_name", "text"),
    [
        (None, None, "null", b"null"),
        (b'{"a": 1.10}', None, "json", b'{"a": 1.10}'),
        (b"[1]", "string", "string", b'"[1]"'),
        (b"{broken", "json", "string", b'"{broken"'),
        (b"", None, "string", b'""'),
        (b"\xff", "json", "binary", b'"/w=="'),
        (b"\0\0\0\0\x01\xfe", "avro", "binary", b'"AAAAAAH+"'),
        (b"\0\0\0\0\x02\x0e", None, "schema 2", b'{"n":7}'),
        (b"\0\0\0\0\x02\x0e", "avro", "avro", b'{"n":7}'),
    ],
)
async def test_values_are_decoded_as_far_as_they_can_be(
    data: bytes | None, wanted: str | None, format_name: str, text: bytes
) -> None:
    """As requested, by the schema that the bytes name, as what fits, else base64.

    A registry that is away gets one request.
    """
    registry = Registry(SchemaRegistryConfig(), ManualClock())
    reader = DeadLetterReader(Codecs(registry), None, wanted)
    poison = ("headrace.redrive.count", b"9" * 5000)
    record = Record("t.dlq", 0, 1, 5, None, data, lambda: [*headers(), poison])
    letter = FoundDeadLetter(record, Origin(TopicPartition("t", 0), 7, 5, "g", 3, "E", dict(headers())), True)
    for _ in range(2):
        shown = await reader.read(letter)
        assert (shown.value_format, bytes(shown.value)) == (format_name, text)
        assert (shown.completed, shown.stack_trace, shown.redrives) == (True, "Too LATE for it", 0)
    assert registry.refused <= 1
    await registry.close()


async def test_no_more_than_two_read_at_a_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is refused; and a reader that failed makes room."""
    gate = asyncio.Event()

    async def load() -> None:
        await gate.wait()
        raise InvalidRequest("gone")

    monkeypatch.setattr(pages, "CompletedOffsets", lambda *_: SimpleNamespace(load=load))
    registry = Registry(SchemaRegistryConfig(), ManualClock())
    letters = DeadLetterPages(cast(Any, cluster), Codecs(registry), ManualClock(), HeadraceConfig())
    monkeypatch.setattr(letters.topics, "names", AsyncMock(return_value={}))
    asks = [asyncio.ensure_future(letters.page("t.dlq", Selection(), ScanOptions(), 1)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="2 requests are reading"):
        await letters.page("t.dlq", Selection(), ScanOptions(), 1)
    gate.set()
    assert [type(error) for error in await asyncio.gather(*asks, return_exceptions=True)] == [InvalidRequest] * 2
    assert letters._scans == 0
    await registry.close()


@pytest.mark.parametrize(
    ("now_ms", "day_ms", "since", "letters"),
    [(10_000_000, 1_000, "2.980", 53), (10_000_000, 100_000, "0.000", 500), (3_500, 1_000, "2.500", 125)],
)
async def test_letters_are_counted_back_from_the_newest(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, now_ms: int, day_ms: int, since: str, letters: int
) -> None:
    """Not from now, when nothing may have come for days; nor from a time that a wrong clock put into the future."""
    monkeypatch.setattr(pages, "CompletedOffsets", lambda *_: cluster)
    monkeypatch.setattr(pages, "_DAY_MS", day_ms)
    registry = Registry(SchemaRegistryConfig(), ManualClock())
    clock = ManualClock(now_ms / 1000)
    reader = DeadLetterPages(cast(Any, cluster), Codecs(registry), clock, HeadraceConfig())
    found = await reader.statistics("t.dlq", Selection(), ScanOptions())
    assert found.since == f"1970-01-01T00:00:0{since}+00:00"
    assert (found.dead_letters, sum(found.times.values()), found.partial) == (letters, letters, False)
    assert found.errors["ValueError"] + found.errors["HTTP 500"] == letters
    assert 0 < found.left < letters
    some = await reader.statistics("t.dlq", Selection(), ScanOptions(limit_records=20))
    assert (some.scanned // 10, some.partial) == (2, True)
    monkeypatch.setattr(pages, "_DAY_MS", 1000)
    monkeypatch.setattr(pages, "_LONG_MS", -1)
    by_day = await reader.statistics("t.dlq", Selection(since=moment(0)), ScanOptions())
    assert len(found.times) == 1 < len(by_day.times)
    await registry.close()


def test_which_topics_are_dead_letter_topics() -> None:
    """By their ending, by the settings of a consumer that reads what they are named after, or as those of others."""
    names = ["a.dlq", "a.quarantine", "b.DLT", "letters", "metrics.1", "metrics.1-failed", "orders", "other-failed"]
    topics = [SimpleNamespace(name=name, partitions=[0]) for name in names]
    admin: Any = SimpleNamespace(list_topics=AsyncMock(return_value=topics))

    def consumer(**settings: Any) -> ReactiveConsumerConfig:
        url = {"url": "http://127.0.0.1:1"}
        return ReactiveConsumerConfig.model_validate({"group": "g", "backend": url, **settings})

    consumers = [
        consumer(topics=["orders"], dead_letter={"topic": "letters"}),
        consumer(topic_patterns=[r"metrics\..*"], dead_letter={"topic": "{topic}-failed"}),
    ]
    config: Any = SimpleNamespace(
        reactive_consumers=dict(enumerate(consumers)), foreign_dead_letters={"b.DLT": "b", "gone.DLT": "gone"}
    )
    found = asyncio.run(DeadLetterTopics(admin, config).names())
    assert list(found) == ["a.dlq", "a.quarantine", "b.DLT", "letters", "metrics.1-failed"]
    assert found["letters"] == (1, consumers[0])
    assert found["a.dlq"] == (1, None)
