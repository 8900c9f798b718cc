"""Bare loops over the client: what the machine can do without Headrace, each in a process of its own.

usage: python -m bench.bare LOOP BOOTSTRAP TOPIC RECORDS [PORT]
`produce` writes values of 100 bytes, `produce-kb` of 1,000, `produce-json` JSON objects of 100 bytes.
`consume` reads values, `consume-json` parses them, `relay` writes each to the topic TOPIC-out, `pool` parses them in
a pool of two processes.
`tick` writes a record every 20 ms, each holding the moment, `tick-slowly` every 200 ms.
`steady` writes 1,000 a second, of which none waits for the one before.
`post` sends 100 records per request, 8 requests in flight; `post-one` one record, 64 in flight. Requests are made by
the client of the reactive consumer.
Prints JSON: records, seconds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import confluent_kafka
import msgspec
import uvloop

from headrace.sidecar.reactive.client import BackendClient

PER_POST = {"post": (100, 8), "post-one": (1, 64)}
"""Records of a request, and requests in flight."""


JSON = b'{"id": 12345678, "name": "%s", "amount": 12.5, "tags": ["a", "b"], "active": true}' % (b"x" * 20)
"""100 bytes."""


def producer(servers: str, topic: str) -> confluent_kafka.Producer:
    client = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "partitioner": "murmur2_random",
        }
    )
    client.list_topics(topic)
    return client


def write(client: confluent_kafka.Producer, topic: str, values: Iterable[bytes | None]) -> None:
    for number, value in enumerate(values):
        while True:
            try:
                client.produce(topic, value)
                break
            except BufferError:
                client.poll(0.01)
        if not number % 1000:
            client.poll(0)


def produce(servers: str, topic: str, records: int, value: bytes = b'"' + b"x" * 98 + b'"') -> float:
    client = producer(servers, topic)
    start = time.perf_counter()
    write(client, topic, repeat(value, records))
    client.flush()
    return time.perf_counter() - start


def produce_kb(servers: str, topic: str, records: int) -> float:
    return produce(servers, topic, records, b'"' + b"x" * 998 + b'"')


def produce_json(servers: str, topic: str, records: int) -> float:
    return produce(servers, topic, records, JSON)


def consumer(servers: str, topic: str) -> confluent_kafka.Consumer:
    client = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"bare-{uuid.uuid4().hex}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 10,
            "queued.max.messages.kbytes": 16_384,
        }
    )
    client.subscribe([topic])
    return client


def consume(
    servers: str,
    topic: str,
    records: int,
    use: Callable[[Sequence[Any]], object] = len,
    end: Callable[[], object] = bool,
) -> float:
    client, seen, start = consumer(servers, topic), 0, 0.0
    while seen < records:
        batch = client.consume(500, 1)
        start = start or (time.perf_counter() if batch else 0.0)
        use([record.value() for record in batch])
        seen += len(batch)
    end()
    seconds = time.perf_counter() - start
    client.close()
    return seconds


def parse(values: Sequence[Any]) -> None:
    for value in values:
        json.loads(value)


def consume_json(servers: str, topic: str, records: int) -> float:
    return consume(servers, topic, records, parse)


def pool(servers: str, topic: str, records: int) -> float:
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        workers.map(parse, [[], []])
        pending: deque[Any] = deque()

        def use(values: Sequence[Any]) -> None:
            pending.append(workers.apply_async(parse, (values,)))
            while len(pending) > 8:
                pending.popleft().get()

        return consume(servers, topic, records, use, lambda: [each.get() for each in pending])


def relay(servers: str, topic: str, records: int) -> float:
    target = f"{topic}-out"
    client = producer(servers, target)
    return consume(servers, topic, records, lambda values: write(client, target, values), client.flush)


def tick_slowly(servers: str, topic: str, records: int) -> float:
    return tick(servers, topic, records, 0.2)


def steady(servers: str, topic: str, records: int) -> float:
    client = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "linger.ms": 1})
    client.list_topics(topic)
    start = time.monotonic()
    for number in range(records):
        if (ahead := start + number / 1000 - time.monotonic()) > 0:
            time.sleep(ahead)
        client.produce(topic, b"%d" % time.monotonic_ns(), partition=number % 8)
        client.poll(0)
    client.flush()
    return 1.0


def tick(servers: str, topic: str, records: int, pause_seconds: float = 0.02) -> float:
    client = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "linger.ms": 0})
    partitions = len(client.list_topics(topic).topics[topic].partitions)
    for number in range(records):
        client.produce(topic, b"%d" % time.monotonic_ns(), partition=number % partitions)
        client.flush()
        time.sleep(pause_seconds)
    return 1.0


def entry(record: confluent_kafka.Message) -> dict[str, object]:
    return {
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": record.timestamp()[1],
        "headers": dict(record.headers() or ()),
        "value": msgspec.Raw(record.value()),
    }


async def post(what: str, servers: str, topic: str, records: int, port: int) -> float:
    source, loop = consumer(servers, topic), asyncio.get_running_loop()
    per_post, in_flight = PER_POST[what]
    capacity = asyncio.Semaphore(in_flight)
    seen, start, tasks = 0, 0.0, set()
    client = BackendClient(f"http://127.0.0.1:{port}/", timeout_seconds=30, max_response_bytes=1_048_576)

    async def send(body: bytes) -> None:
        await client.post(body, b"Content-Type: application/json\r\n")
        capacity.release()

    while seen < records:
        batch = await loop.run_in_executor(None, source.consume, 500, 0.1)
        start = start or (time.perf_counter() if batch else 0.0)
        seen += len(batch)
        for at in range(0, len(batch), per_post):
            if per_post == 1:
                body = batch[at].value()
            else:
                body = msgspec.json.encode([entry(record) for record in batch[at : at + per_post]])
            await capacity.acquire()
            task = asyncio.ensure_future(send(body))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    client.close()
    source.close()
    return time.perf_counter() - start


if __name__ == "__main__":
    what, servers, topic, count = sys.argv[1:5]
    if what in PER_POST:
        elapsed = uvloop.run(post(what, servers, topic, int(count), int(sys.argv[5])))
    else:
        loops: dict[str, Callable[[str, str, int], float]] = {"produce": produce, "consume": consume, "tick": tick}
        loops |= {"produce-kb": produce_kb, "produce-json": produce_json, "consume-json": consume_json, "pool": pool}
        loops |= {"relay": relay, "tick-slowly": tick_slowly, "steady": steady}
        elapsed = loops[what](servers, topic, int(count))
    print(json.dumps({"records": int(count), "seconds": elapsed}))
