"""What HTTP to Kafka costs at the least in Python: a bare parser, a producer, a delivery thread, and no rules at all.

No checks, no ids, no record headers, no limits, no errors: every request is taken for a good one.

usage: python -m bench.bare_server BOOTSTRAP
Prints its port.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import confluent_kafka
import httptools
import msgspec
import uvloop

SETTINGS = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 1,
    "queue.buffering.max.messages": 2_000_000,
    "partitioner": "murmur2_random",
}


class Entry(msgspec.Struct):
    """One record of a request."""

    value: msgspec.Raw


class Request(msgspec.Struct):
    """A request's body."""

    records: list[Entry]


decode = msgspec.json.Decoder(Request).decode
encode = msgspec.json.Encoder().encode


class Batch:
    """The records of one request that are out."""

    def __init__(self, size: int, connection: Connection, post: Callable[[Batch], None]) -> None:
        self.results: list[Any] = [None] * size
        self.left, self.connection, self.post = size, connection, post

    def reported(self, index: int, error: Any, record: Any) -> None:
        self.results[index] = {"partition": record.partition(), "offset": record.offset()}
        self.left -= 1
        if not self.left:
            self.post(self)


class Delivery:
    """A producer, and the thread that takes its reports."""

    def __init__(self, servers: str) -> None:
        self.client = confluent_kafka.Producer({"bootstrap.servers": servers, **SETTINGS})
        self.loop = asyncio.get_running_loop()
        self.done: deque[Batch] = deque()
        self.awake = False
        threading.Thread(target=self.poll, daemon=True).start()

    def poll(self) -> None:
        while True:
            self.client.poll(0.1)

    def post(self, batch: Batch) -> None:
        self.done.append(batch)
        if not self.awake:
            self.awake = True
            self.loop.call_soon_threadsafe(self.answer)

    def answer(self) -> None:
        self.awake = False
        while self.done:
            batch = self.done.popleft()
            batch.connection.answer(encode({"offsets": batch.results, "requestStatus": "OK"}))


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery, self.body = delivery, b""
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.topic = url.rpartition(b"/")[2].decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        records = decode(self.body).records
        self.body = b""
        batch = Batch(len(records), self, self.delivery.post)
        produce = self.delivery.client.produce
        for index, record in enumerate(records):
            produce(self.topic, bytes(record.value), on_delivery=partial(batch.reported, index))

    def answer(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)


async def main(servers: str) -> None:
    delivery = Delivery(servers)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(delivery), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
