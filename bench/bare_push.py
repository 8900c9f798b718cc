"""A bare consume + POST loop with its own few lines of HTTP: what one Python process can push.

usage: python -m bench.bare_push partition|any|many BOOTSTRAP TOPIC PORT
`partition`: one record per POST, one request of each partition in flight, in order. `any`: one record per POST, 64
requests in flight, in no order. `many`: 100 records per POST in JSON, 8 requests in flight, in no order.
Requests have the headers of Headrace's. Nothing is checked but the status, and nothing is repeated. Offsets are
committed every second. It runs until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import defaultdict, deque
from typing import Any

import confluent_kafka
import httptools
import msgspec
import uvloop

from bench.bare import consumer

IN_FLIGHT = {"any": 64, "many": 8}
PER_POST, WAITING = 100, 4000
HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
POSITION = b"X-Kafka-Topic: %b\r\nX-Kafka-Partition: %d\r\nX-Kafka-Offset: %d\r\nX-Kafka-Timestamp: %d\r\n"
ID = b"X-Correlation-Id: %b-%d-%d\r\n\r\n"
Message = Any
"""Of confluent-kafka, whose annotations say that each part may be missing."""


class Loop:
    """The records that wait, by lane; a lane has one connection or shares all of them."""

    def __init__(self, mode: str, servers: str, topic: str, port: int) -> None:
        self.mode, self.topic, self.port = mode, topic.encode(), port
        self.source = consumer(servers, topic)
        self.waiting: defaultdict[int, deque[list[Message]]] = defaultdict(deque)
        self.free: defaultdict[int, list[Connection]] = defaultdict(list)
        self.sent: dict[int, int] = {}
        self.taken = self.done = 0

    async def run(self, partitions: int) -> None:
        """Open the connections and send."""
        self.loop = asyncio.get_running_loop()
        lanes = range(partitions) if self.mode == "partition" else [0] * IN_FLIGHT[self.mode]
        for lane in lanes:
            made = await self.loop.create_connection(lambda lane=lane: Connection(self, lane), "127.0.0.1", self.port)  # type: ignore[misc]
            self.free[lane].append(made[1])
        threading.Thread(target=self.consume, daemon=True).start()
        await asyncio.Event().wait()

    def consume(self) -> None:
        committed = time.monotonic()
        while True:
            while self.taken - self.done > WAITING:
                time.sleep(0.002)
            if batch := self.source.consume(500, 0.1):
                self.taken += len(batch)
                self.loop.call_soon_threadsafe(self.take, batch)
            if time.monotonic() - committed > 1 and self.sent:
                committed = time.monotonic()
                positions = [(self.topic.decode(), partition, at + 1) for partition, at in [*self.sent.items()]]
                self.source.commit(offsets=[confluent_kafka.TopicPartition(*position) for position in positions])

    def take(self, batch: list[Message]) -> None:
        step = PER_POST if self.mode == "many" else 1
        for at in range(0, len(batch), step):
            some = batch[at : at + step]
            lane = some[0].partition() if self.mode == "partition" else 0
            self.waiting[lane].append(some)
        for lane, free in self.free.items():
            while free and self.waiting[lane]:
                free.pop().send(self.waiting[lane].popleft())

    def request(self, some: list[Message]) -> bytes:
        """Return the request for some records."""
        if self.mode == "many":
            body = msgspec.json.encode([entry(record) for record in some])
            return HEAD % (self.port, len(body)) + b"\r\n" + body
        [record] = some
        topic, partition, offset, body = self.topic, record.partition(), record.offset(), record.value()
        position = POSITION % (topic, partition, offset, record.timestamp()[1])
        return HEAD % (self.port, len(body)) + position + ID % (topic, partition, offset) + body


class Connection(asyncio.Protocol):
    """Sends the next request when the response of the last one is there."""

    def __init__(self, loop: Loop, lane: int) -> None:
        self.loop, self.lane = loop, lane
        self.some: list[Message] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def send(self, some: list[Message]) -> None:
        self.some = some
        self.transport.write(self.loop.request(some))

    def on_message_complete(self) -> None:
        assert self.parser.get_status_code() == 200
        loop, last = self.loop, self.some[-1]
        loop.sent[last.partition()] = last.offset()
        loop.done += len(self.some)
        self.parser = httptools.HttpResponseParser(self)
        if waiting := loop.waiting[self.lane]:
            self.send(waiting.popleft())
        else:
            loop.free[self.lane].append(self)


def entry(record: Message) -> dict[str, object]:
    return {
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": record.timestamp()[1],
        "headers": dict(record.headers() or ()),
        "value": msgspec.Raw(record.value()),
    }


if __name__ == "__main__":
    mode, servers, topic, port = sys.argv[1:]
    work = Loop(mode, servers, topic, int(port))
    uvloop.run(work.run(len(work.source.list_topics(topic).topics[topic].partitions)))
