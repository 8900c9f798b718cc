"""What a cluster in memory and a real one have in common. Each promise is tried on both."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import confluent_kafka
import pytest

from headrace.config.consumers import FlowControl
from headrace.errors import KafkaError, PartitionNotFound, RecordTooLarge, TopicNotFound, TransactionAborted
from headrace.kafka.consumer import Consumer
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import Deadline, SystemClock
from tests.group_member import Heard
from tests.raw_server import until

CLOCK = SystemClock()
ROWS: list[tuple[int, bytes | None, bytes | None, list[Any]]] = [
    (1000, b"k", b"v", []),
    (3000, None, b"", [("a", b"1"), ("b", None), ("a", b"2")]),
    (2000, b"k", None, []),
]


class Clients(NamedTuple):
    """The clients of a cluster, and a topic of two partitions."""

    topic: str
    admin: Any
    topics: Any
    producer: Any
    transactions: Any
    read_records: Any
    cut: Callable[[TopicPartition, int], Coroutine[Any, Any, None]]
    """Deletes the records before an offset."""

    @property
    def places(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, number) for number in range(2)]

    async def fill(self, partition: TopicPartition, count: int) -> None:
        records = [OutgoingRecord(partition.topic, None, b"%d" % number, None, 0) for number in range(count)]
        assert len(await self.producer.produce(records)) == count

    async def read(self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> list[Record]:
        return [record async for batch in self.read_records(self.admin.config, starts, ends) for record in batch]

    @contextlib.asynccontextmanager
    async def member(self, **policy: Any) -> AsyncIterator[tuple[Consumer, Heard]]:
        """Run a consumer that has its partitions."""
        flow, heard, own = FlowControl(), Heard(), ReadPolicy(**policy)
        group = f"g-{self.topic}"
        consumer = Consumer(
            self.admin, name="c", group=group, topics=[self.topic], listener=heard, flow=flow, clock=CLOCK, policy=own
        )
        await consumer.start()
        try:
            await until(lambda: set(heard.epochs) == set(self.places))
            yield consumer, heard
            assert consumer.death is None
        finally:
            await consumer.drain(Deadline(CLOCK, 10))
            await consumer.stop()

    async def until_committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        async def is_committed() -> bool:
            return bool(offsets == await self.admin.committed(f"g-{self.topic}"))

        await until(is_committed)


Promise = Callable[[Clients], Coroutine[Any, Any, None]]
PROMISES: list[Promise] = []
PROMISES_OF_GROUPS: list[Promise] = []
"""Those that need a member of a group."""


def promise(test: Promise) -> Promise:
    """Add a test to the contract."""
    PROMISES.append(test)
    return test


def promise_of_groups(test: Promise) -> Promise:
    """Add a test that starts a member."""
    PROMISES_OF_GROUPS.append(test)
    return test


@promise
async def what_is_read_is_what_was_written(clients: Clients) -> None:
    place, other = clients.places
    records = [OutgoingRecord(clients.topic, key, value, headers, 0, at) for at, key, value, headers in ROWS]
    assert await clients.producer.produce(records) == [Produced(0, offset) for offset in range(3)]
    found = await clients.read({place: 0, other: 0}, {place: 3, other: 0})
    assert [(r.offset, r.timestamp_ms, r.key, r.value, r.headers, r.size_bytes) for r in found] == [
        (offset, at, key, value, headers, len(key or b"") + len(value or b""))
        for offset, (at, key, value, headers) in enumerate(ROWS)
    ]
    assert [record.offset for record in await clients.read({place: 1}, {place: 2})] == [1]


@promise
async def the_key_decides_the_partition(clients: Clients) -> None:
    keys = [b"%d" % number for number in range(20)]
    results = await clients.producer.produce([OutgoingRecord(clients.topic, key, b"") for key in keys])
    assert [result.partition for result in results] == [confluent_kafka.murmur2(key, 2) for key in keys]


@promise
async def results_come_later_and_once(clients: Clients) -> None:
    done: list[list[Any]] = []
    clients.producer.send([OutgoingRecord(clients.topic, None, b"", None, 1)] * 2, done.append)
    assert done == []
    await until(lambda: done)
    assert done == [[Produced(1, 0), Produced(1, 1)]]


@promise
async def reading_follows_a_partition(clients: Clients) -> None:
    place = clients.places[0]
    await clients.fill(place, 1)
    async with contextlib.aclosing(clients.read_records(clients.admin.config, {place: 0})) as batches:
        found: list[int] = []
        async for batch in batches:
            found += [record.offset for record in batch]
            if found == [0] and not batch:
                await clients.fill(place, 1)
            if found == [0, 1]:
                break


@promise
async def a_missing_topic_is_named(clients: Clients) -> None:
    admin, name = clients.admin, f"{clients.topic}-none"
    assert (await admin.has_topic(name), await admin.topic_ids([name]), clients.topics.known(name)) == (0, {}, None)
    for call in (admin.describe_topic, admin.topic_offsets, clients.topics.partitions_of):
        with pytest.raises(TopicNotFound, match=name):
            await call(name)


@promise
async def a_topic_is_made_like_another_one(clients: Clients) -> None:
    admin, names = clients.admin, [f"{clients.topic}-{number}" for number in range(2)]
    for partitions in (0, 7):
        await admin.ensure_topic_like(names[0], clients.topic, partitions)
    await admin.ensure_topic_like(names[1], clients.topic, 1)

    async def are_known() -> bool:  # a broker learns of a topic later than its controller
        return len(await admin.topic_ids(names)) == len(names)

    await until(are_known)
    assert [len((await admin.describe_topic(name)).partitions) for name in names] == [2, 1]
    assert set(names) <= {topic.name for topic in await admin.list_topics()}
    assert len(set((await admin.topic_ids([*names, clients.topic])).values())) == 3
    assert await clients.topics.partitions_of(names[0]) == clients.topics.known(names[0]) == 2


@promise
async def offsets_are_those_of_the_log(clients: Clients) -> None:
    admin, place, other = clients.admin, *clients.places
    await clients.producer.produce([OutgoingRecord(clients.topic, None, b"", None, 0, at) for at, *_ in ROWS])
    assert await admin.topic_offsets(clients.topic) == {place: (0, 3), other: (0, 0)}
    assert await admin.written_offsets([place, other]) == {place: 3, other: 0}
    assert await admin.known_ends([place, TopicPartition(clients.topic, 9)]) == {place: 3}
    assert await admin.time_bounds([place, other]) == {place: (1000, 3000)}
    for at, offset in ((0, 0), (1001, 1), (2500, 1)):
        assert await admin.offsets_since([place, other], at) == {place: offset}
    assert await admin.offsets_since([place], 3001) == {}
    with pytest.raises(PartitionNotFound):
        await admin.end_offsets([TopicPartition(clients.topic, 9)])


@promise
async def what_was_deleted_is_out_of_range(clients: Clients) -> None:
    place = clients.places[0]
    await clients.fill(place, 3)
    await clients.cut(place, 2)
    assert await clients.admin.start_offsets([place]) == {place: 2}
    assert [record.offset for record in await clients.read({place: 2}, {place: 3})] == [2]
    with pytest.raises(KafkaError):
        await clients.read({place: 1}, {place: 3})


@promise
async def a_transaction_is_written_whole_or_not_at_all(clients: Clients) -> None:
    place, other = clients.places
    row = OutgoingRecord(clients.topic, None, b"", None, 0)
    last = lambda results: OutgoingRecord(clients.topic, None, b"%d" % results[-1].offset, None, 1)  # noqa: E731
    assert await clients.transactions.submit([row, row], last) == [Produced(0, 0), Produced(0, 1)]
    refused = await clients.transactions.submit(
        [row, OutgoingRecord(clients.topic, None, bytes(2_000_000), None, 0)], last
    )
    assert [type(result) for result in refused] == [TransactionAborted, RecordTooLarge]
    ends = await clients.admin.written_offsets(clients.places)  # the end of a transaction is seen a moment later
    found = await clients.read({place: 0, other: 0}, ends)
    assert sorted((record.partition, record.value) for record in found) == [(0, b""), (0, b""), (1, b"1")]


@promise_of_groups
async def a_group_continues_behind_what_it_has_committed(clients: Clients) -> None:
    place, other = clients.places
    await clients.fill(place, 5)
    await clients.until_committed({})
    async with clients.member() as (consumer, heard):
        await until(lambda: len(heard.records) == 5)
        assert heard.records == [(place, heard.epochs[place], offset) for offset in range(5)]
        assert heard.assigned[0][1].get(place, Committed(0)).offset in (0, -1001)
        consumer.commit({place: Committed(3, "m")})
        await clients.until_committed({place: 3})
        assert await consumer.committed([place, other]) == {place: Committed(3, "m")}
    async with clients.member() as (_, heard):
        await until(lambda: len(heard.records) == 2)
        assert heard.records == [(place, heard.epochs[place], offset) for offset in (3, 4)]
        assert {at for _, committed in heard.assigned for at in committed.items()} == {(place, Committed(3, "m"))}


@promise_of_groups
async def a_seek_commits_and_reads_again_in_a_new_epoch(clients: Clients) -> None:
    place = clients.places[0]
    await clients.fill(place, 3)
    async with clients.member() as (consumer, heard):
        await until(lambda: len(heard.records) == 3)
        before = heard.epochs[place]
        assert not await consumer.seek(place, before - 1, Committed(1))
        assert await consumer.seek(place, before, Committed(1))
        await until(lambda: len(heard.records) == 5)
        assert heard.records[3:] == [(place, heard.epochs[place], offset) for offset in (1, 2)]
        assert heard.epochs[place] > before
        await clients.until_committed({place: 1})


@promise_of_groups
async def the_end_of_a_log_is_where_latest_begins(clients: Clients) -> None:
    place = clients.places[0]
    await clients.fill(place, 2)
    async with clients.member(reset="latest") as (_, heard):
        await clients.fill(place, 1)
        await until(lambda: heard.records)
        assert heard.records == [(place, heard.epochs[place], 2)]


@promise_of_groups
async def records_that_are_gone_are_a_gap(clients: Clients) -> None:
    place = clients.places[0]
    await clients.fill(place, 5)
    async with clients.member() as (consumer, heard):
        await until(lambda: heard.records)
        consumer.commit({place: Committed(1)})
        await clients.until_committed({place: 1})
    await clients.cut(place, 4)
    async with clients.member(on_gap="continue") as (_, heard):
        await until(lambda: heard.records)
        assert (heard.gaps, heard.records) == ([(place, 3)], [(place, heard.epochs[place], 4)])
