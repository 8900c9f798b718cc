"""The control table: order, what watchers see, corrupt entries, and writing that waits for its own view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaError, KafkaTimeout, KafkaUnavailable
from headrace.kafka import JSON_OBJECTS, CompactedTable, InternalTopic, compacted_table
from headrace.records import OutgoingRecord, Record
from headrace.runtime import Clock, SystemClock
from headrace.runtime.gauge_registry import GaugeKey, gauges
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

TOPIC = "_control"


class Cluster(MemoryCluster):
    """Has one topic. Readers fail once after `broken` is set."""

    def __init__(self, failure: KafkaError | None = None, *, create_topics: bool = True) -> None:
        super().__init__({TOPIC: 1}, KafkaConfig(create_topics=create_topics))
        self.failure = failure
        self.broken = asyncio.Event()
        self.starts: list[int] = []

    def put(self, key: bytes | None, value: bytes | None) -> None:
        self.write(OutgoingRecord(TOPIC, key, value, None, 0))

    async def read_records(
        self, kafka: Any, starts: Any, ends: Any = None, properties: Any = None
    ) -> AsyncGenerator[list[Record], None]:
        self.starts += starts.values()
        async for records in super().read_records(kafka, starts, ends):
            if self.broken.is_set():
                self.broken.clear()
                raise KafkaError("the reader broke")
            yield records

    def fill(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.put(key, entry({"size": len(keys)}))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    cluster.read_by(monkeypatch, compacted_table)
    return cluster


def table(cluster: Cluster, clock: Clock | None = None, *, reads: bool = True) -> CompactedTable[Any]:
    admin: Any = cluster
    topic, clock = InternalTopic(TOPIC), clock or SystemClock()
    made = CompactedTable(admin, topic, JSON_OBJECTS, cluster.producer.produce, clock, optional="control")
    cluster.tables = [made] if reads else []
    return made


def entry(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(value)


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "key, value",
    [(b"a", b"{"), (b"a", b"[]"), (b"a", b"\xff"), (b"\xff", b"{}"), (None, b"{}"), (b"a", DEEP)],
    ids=["cut off", "no object", "no text", "no key as text", "no key", "nested"],
)
async def test_a_corrupt_entry_is_passed_over_with_an_alarm(
    key: bytes | None, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no object under a name says so in the log and in a gauge; the entries beside it hold."""
    log = Cluster(KafkaUnavailable("no broker answers"))
    view = table(log)
    await view.start()
    log.put(b"b", entry({"holds": True}))
    log.put(key, value)
    view.loaded(len(log.records(TOPIC)))
    assert view.items("") == {"b": {"holds": True}}
    assert "offset 1 of _control is not an entry" in caplog.text
    assert gauges()[GaugeKey("headrace_corrupt_control_entries")] == 1
    log.put(key, None)  # taken away by hand
    assert gauges()[GaugeKey("headrace_corrupt_control_entries")] == 0
    await view.stop()


async def test_put_returns_once_the_own_view_holds_it() -> None:
    """An entry that is written and not read back may hold or not, and the error says so."""
    log = Cluster()
    view = table(log)
    view.loaded(len(log.records(TOPIC)))
    assert await view.put("hold/g", {"by": "me"}) == 0
    assert view.items("hold/") == {"hold/g": {"by": "me"}}
    assert await view.put_all({"hold/g": None, "hold/h": {}}) == [1, 2]
    assert await view.put_all({}) == [], "another process may have removed all that was to be removed"
    log.tables.clear()
    waiting = asyncio.ensure_future(view.put("hold/g", {"by": "you"}))
    await asyncio.sleep(0)
    assert not waiting.done()
    view.read(log.records(TOPIC)[-1:], 4)
    assert await waiting == 3
    with pytest.raises(KafkaTimeout, match="may or may not be written"):
        await view.put_all({"hold/g": None}, limit_seconds=0.01)
    log.failure = KafkaUnavailable("no broker answers")
    with pytest.raises(KafkaUnavailable, match="no broker answers"):
        await view.put("a", {})


async def test_nothing_is_written_before_the_table_is_read_or_where_there_is_none() -> None:
    """The response says which of the two it is; without a topic nothing can have been steered, so nothing waits."""
    log = Cluster()
    view = table(log)
    with pytest.raises(KafkaUnavailable, match="_control has not been read yet"):
        await view.put("a", {})
    assert not view.known.is_set()
    assert not view.readiness().ready
    view.turn_off("may not be created")
    view.known.set()
    with pytest.raises(KafkaUnavailable, match="may not be created"):
        await view.put("a", {})
    assert view.known.is_set()
    assert view.readiness() == (True, "control is off: may not be created")
    assert log.records(TOPIC) == []


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.none() | st.integers(0, 9)), max_size=30),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_every_view_is_the_same_wherever_it_began(
    steps: list[tuple[str, int | None]], loaded_at: int, watched_at: int
) -> None:
    """A watcher that applies what it is told holds what the table holds: the last word for each key."""
    log = Cluster()
    view = table(log)
    told: dict[str, Any] = {}

    def apply(key: str, value: Mapping[str, Any] | None) -> None:
        told.pop(key, None) if value is None else told.update({key: value})

    for number, (key, value) in enumerate(steps):
        if number == loaded_at:
            view.loaded(len(log.records(TOPIC)))
        if number == watched_at:
            view.watch("", apply)
        log.put(key.encode(), None if value is None else entry({"value": value}))
    view.loaded(len(log.records(TOPIC)))
    if watched_at >= len(steps):
        view.watch("", apply)
    wanted = {key: {"value": value} for key, value in dict(steps).items() if value is not None}
    assert view.items("") == wanted == told


async def test_an_interrupted_load_continues_where_it_ended(cluster: Cluster) -> None:
    """Older changes that are applied again would undo newer ones for a moment, and repeat commands."""
    clock, seen = ManualClock(), []
    cluster.fill([b"a"])
    log = cluster.log(TOPIC)
    log.append([UnwrittenRecord(b"a", entry({"id": number})) for number in range(4)], producer_id=1)
    view = table(cluster, clock, reads=False)
    view.watch("", lambda key, value: seen.append((key, value)))
    await view.start()
    await clock.settle()
    assert (seen, view.readiness().ready) == ([], False)
    cluster.broken.set()
    await clock.settle()
    log.end_transaction(1, committed=True)
    await clock.advance(1)
    assert (cluster.starts, seen, view.readiness().ready) == ([0, 1, 6], [("a", {"id": 3})], True)
    await view.catch_up()
    await view.stop()


@pytest.mark.parametrize(
    "is_new, size, writes",
    [(True, 2, True), (True, 9, False), (False, 2, True), (False, 2, False)],
    ids=["created again", "and longer", "cut off", "and not written"],
)
async def test_a_topic_that_was_created_again_is_read_from_its_start(
    cluster: Cluster, is_new: bool, size: int, writes: bool
) -> None:
    """What is not in it is removed, and what is written to it is read back."""
    clock, seen = ManualClock(), dict[str, Any]()
    cluster.fill([b"a", b"b", b"c"])
    view = CompactedTable(cluster, InternalTopic(TOPIC), JSON_OBJECTS, cluster.producer.produce, clock)  # type: ignore[arg-type]
    view.watch("", lambda key, value: seen.update({key: value}))
    await view.start()
    await clock.settle()
    assert set(seen) == {"a", "b", "c"}
    if is_new:
        cluster.empty()
    else:
        cluster.log(TOPIC).truncate(0)
    cluster.fill([b"b", *[b"d"] * (size - 1)])
    if writes:
        with pytest.raises(KafkaUnavailable, match="recreated or truncated"):
            await view.put("d", {"size": size})
    cluster.broken.set()
    await clock.advance(3)
    assert seen == {"a": None, "b": {"size": size}, "c": None, "d": {"size": size}}
    assert view.readiness().ready
    assert await view.put("e", {}) == size + writes
    assert seen["e"] == {}
    await view.stop()


async def test_reading_back_ends_behind_open_transactions(cluster: Cluster) -> None:
    """A process that was killed may have left one, whose end is waited for."""
    cluster.fill([b"a"])
    cluster.log(TOPIC).append([UnwrittenRecord(b"b")], producer_id=1)

    async def read() -> list[bytes | None]:
        topic, admin = InternalTopic(TOPIC), cast(Any, cluster)
        return [record.key async for batch in compacted_table.read_back(admin, topic) for record in batch]

    reading = asyncio.ensure_future(read())
    await ManualClock().settle()
    assert not reading.done()
    cluster.log(TOPIC).end_transaction(1, committed=True)
    assert await reading == [b"a", b"b"]
