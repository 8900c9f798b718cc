"""What a consumer fetches is the same by the compiled module and from the client's own objects."""

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client.native import native_module
from headrace.kafka.fetch_queue import FetchEvent, FetchQueue
from headrace.records import RecordBatch
from headrace_devkit.testing import Cluster, MakeTopic

pytestmark = pytest.mark.skipif(native_module(KafkaConfig()) is None, reason="the compiled module was not built here")
_LIMIT_SECONDS = 60.0
Open = Callable[..., FetchQueue]


@pytest.fixture(params=["auto", "off"])
def opened(request: pytest.FixtureRequest, kafka: Cluster) -> Iterator[Open]:
    queues: list[FetchQueue] = []

    def open_queue(**properties: Any) -> FetchQueue:
        queues.append(queue_of(kafka, request.param, **properties))
        return queues[-1]

    yield open_queue
    for queue in queues:
        queue.close()


def queue_of(kafka: Cluster, native: Any, **properties: Any) -> FetchQueue:
    fixed = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": "g", "enable.partition.eof": True}
    fixed |= {"fetch.wait.max.ms": 10, "fetch.queue.backoff.ms": 10}
    chosen = {name.replace("_", "."): value for name, value in properties.items()}
    client = confluent_kafka.Consumer({**fixed, "auto.offset.reset": "error", **chosen})
    queue = FetchQueue(client, KafkaConfig(native=native))
    assert (queue._native is not None) == (native == "auto")
    return queue


def at(topic: str, offset: int = 0, partition: int = 0) -> list[Any]:
    return [confluent_kafka.TopicPartition(topic, partition, offset)]


def assign(queue: FetchQueue, places: list[Any]) -> None:
    queue.client.incremental_assign(places)
    queue.assigned(places)


def polls(queue: FetchQueue, most: int = 500) -> Iterator[list[Any]]:
    end = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < end:
        yield list(queue.poll(0.1, most).parts)
    raise AssertionError("nothing arrived")


def first(queue: FetchQueue, kind: type, most: int = 500) -> Any:
    return next(part for parts in polls(queue, most) for part in parts if isinstance(part, kind))


def fill(kafka: Cluster, topic: str, count: int, partitions: int = 1) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 5})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=number % partitions)
    producer.flush()


def write_name(producer: Any, topic: str, name: bytes) -> None:
    """Write a record whose header has a name of any bytes, which only librdkafka itself can."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in lines if "/librdkafka" in line))
    library.rd_kafka_headers_new.restype = ctypes.c_void_p
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(ctypes.c_size_t(1)))
    library.rd_kafka_header_add(headers, name, ctypes.c_ssize_t(len(name)), b"1", ctypes.c_ssize_t(1))
    client = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__)
    topic_and_headers = (1, topic.encode(), 3, 0, 10, headers, 0)
    assert library.rd_kafka_producev(client, *topic_and_headers) == 0


def test_columns_are_the_same_by_both_ways(kafka: Cluster, topic: MakeTopic) -> None:
    """Nulls, empty bytes, headers that repeat, are null or not UTF-8, a large record, and the times of both kinds."""
    name, appended = topic(), topic(message_timestamp_type="LogAppendTime")
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "message.max.bytes": 2_000_000})
    rows: list[tuple[Any, Any, Any]] = [
        (b"k", b"v", [("a", b"1"), ("b", None), ("a", b"")]),
        (None, None, None),
        (b"", b"", None),
        (b"k", b"x" * 900_000, None),
    ]
    for (key, value, headers), to in itertools.product(rows, (name, appended)):
        producer.produce(to, value, key, headers=headers, timestamp=1000, partition=0)
    write_name(producer, name, b"\xff")
    producer.flush()
    read: list[Any] = []
    for native in ("auto", "off"):
        queue = queue_of(kafka, native)
        assign(queue, at(name) + at(appended))
        batches, ends, times = [], [], set()
        while len(ends) < 2:
            parts, appends = queue.poll(0.1, 500)
            times |= appends
            batches += [part for part in parts if isinstance(part, RecordBatch)]
            ends += [part[1:] for part in parts if isinstance(part, FetchEvent)]
        queue.close()
        own = [batch for batch in batches if batch.topic_partition.topic == name]
        batch = RecordBatch.join(own)
        read.append((batch, sorted(ends), times))
        batch.headers = [headers or None for headers in batch.headers or ()]
        found = [*zip(batch.keys, batch.values, batch.headers, strict=True)]
        assert found == [*rows, (None, None, [("\ufffd", b"1")])]
        assert (batch.offsets, batch.sizes) == ([0, 1, 2, 3, 4], [2, 0, 0, 900_001, 0])
        assert batch.timestamps_ms[:4] == [1000] * 4
        assert sorted(ends) == sorted([((name, 0), 5), ((appended, 0), 4)])
        assert [place.topic for place in times] == [appended]
    slots = RecordBatch.__slots__
    assert [getattr(read[0][0], slot) for slot in slots] == [getattr(read[1][0], slot) for slot in slots]
    assert read[0][1:] == read[1][1:]


def test_another_start_drops_what_was_fetched_before(kafka: Cluster, topic: MakeTopic, opened: Open) -> None:
    """Also many times in a row, and under the eager protocol: nothing of before arrives, and reading goes on."""
    name = topic()
    fill(kafka, name, 3000)
    queue = opened()
    assign(queue, at(name))
    assert first(queue, RecordBatch).offsets[0] == 0
    for start in [1500, 7, 2999, 1, 0] * 4:
        queue.client.incremental_unassign(at(name))
        assign(queue, at(name, start))
        assert first(queue, RecordBatch, 40).offsets[0] == start
    eager = opened()
    for start in [1500, 7, 2999, 1, 0] * 4:
        eager.client.assign(at(name, start))
        eager.assigned(at(name))
        assert first(eager, RecordBatch, 40).offsets[0] == start


def test_a_pause_and_a_revoke_lose_and_repeat_nothing(kafka: Cluster, topic: MakeTopic, opened: Open) -> None:
    name = topic(2)
    fill(kafka, name, 4000, partitions=2)
    queue = opened()
    assign(queue, at(name) + at(name, 0, 1))
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for turn, parts in enumerate(parts for parts in polls(queue, 100) if parts):
        for part in parts:
            if isinstance(part, RecordBatch):
                offsets[part.topic_partition.partition] += part.offsets
        if [len(found) for found in offsets.values()] == [2000, 2000]:
            break
        queue.client.pause(at(name))
        queue.client.resume(at(name))
        if turn == 5:
            queue.client.incremental_unassign(at(name, 0, 1))
            before = len(offsets[1])
        elif turn == 12:
            assert len(offsets[1]) == before
            assign(queue, at(name, before, 1))
    assert offsets == {0: [*range(2000)], 1: [*range(2000)]}


def test_the_module_refuses_what_it_cannot_read(kafka: Cluster, topic: MakeTopic) -> None:
    module: Any = native_module(KafkaConfig())
    closed = confluent_kafka.Consumer({"group.id": "g"})
    closed.close()
    for other in (None, object(), 1, closed, confluent_kafka.Producer({}), confluent_kafka.Consumer):
        with pytest.raises(ValueError, match="not an open consumer"):
            module.FetchQueue(other)
    queue = queue_of(kafka, "auto")
    native = queue._native
    for arguments in ((0, 0), (-1, 0), (2**31 - 1, 0), (1, -1), (1, float("nan")), (1, float("inf")), (1, 1e300)):
        with pytest.raises(ValueError, match="use 1 to"):
            native.consume(*arguments)
    for place in (("", 0), (topic(), -5)):
        with pytest.raises(ValueError, match="not a partition"):
            native.forward(*place)
    waiting = threading.Thread(target=lambda: native.consume(1, 2))
    waiting.start()
    time.sleep(0.2)
    queue.close()  # waits for the thread
    waiting.join(0.5)
    assert not waiting.is_alive()
    native.close()
    for call in (lambda: native.consume(1, 0), lambda: native.forward("t", 0)):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_a_partition_that_does_not_exist_stops_no_other_one(kafka: Cluster, topic: MakeTopic, opened: Open) -> None:
    """Also when its topic is deleted meanwhile: what the client calls back for it must end no process."""
    name, kept = topic(1), topic(1)
    fill(kafka, name, 1)
    queue = opened(topic_metadata_refresh_interval_ms=100)
    assign(queue, [*at(name), *at(name, partition=7), *at(kept)])
    assert first(queue, RecordBatch).values == [b"0"]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result()
    next(queue.poll(0.1, 1) for _ in polls(queue) if name not in queue.client.list_topics(timeout=5).topics)
    fill(kafka, kept, 1)
    while (batch := first(queue, RecordBatch)).topic_partition.topic != kept:
        continue
    assert batch.values == [b"0"]
