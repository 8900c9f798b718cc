"""Bare loops over the client: what the machine can do without Headrace, each in a process of its own.

usage: python -m bench.bare produce|consume|post BOOTSTRAP TOPIC RECORDS [PORT]
Prints JSON: records, seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid

import aiohttp
import confluent_kafka
import msgspec
import uvloop

PER_POST, IN_FLIGHT = 100, 8


def produce(servers: str, topic: str, records: int) -> float:
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
    value = b'"' + b"x" * 98 + b'"'
    start = time.perf_counter()
    for number in range(records):
        while True:
            try:
                client.produce(topic, value)
                break
            except BufferError:
                client.poll(0.01)
        if not number % 1000:
            client.poll(0)
    client.flush()
    return time.perf_counter() - start


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


def consume(servers: str, topic: str, records: int) -> float:
    client, seen, start = consumer(servers, topic), 0, 0.0
    while seen < records:
        batch = client.consume(500, 1)
        start = start or (time.perf_counter() if batch else 0.0)
        for record in batch:
            record.value()
        seen += len(batch)
    seconds = time.perf_counter() - start
    client.close()
    return seconds


async def post(servers: str, topic: str, records: int, port: int) -> float:
    client, loop = consumer(servers, topic), asyncio.get_running_loop()
    room = asyncio.Semaphore(IN_FLIGHT)
    seen, start, tasks = 0, 0.0, set()
    async with aiohttp.ClientSession() as session:

        async def send(body: bytes) -> None:
            async with session.post(f"http://127.0.0.1:{port}/", data=body) as answer:
                await answer.read()
            room.release()

        while seen < records:
            batch = await loop.run_in_executor(None, client.consume, 500, 0.1)
            start = start or (time.perf_counter() if batch else 0.0)
            seen += len(batch)
            for at in range(0, len(batch), PER_POST):
                entries = [
                    {
                        "topic": r.topic(),
                        "partition": r.partition(),
                        "offset": r.offset(),
                        "timestamp": r.timestamp()[1],
                        "headers": dict(r.headers() or ()),
                        "value": msgspec.Raw(r.value()),
                    }
                    for r in batch[at : at + PER_POST]
                ]
                await room.acquire()
                task = asyncio.ensure_future(send(msgspec.json.encode(entries)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    client.close()
    return time.perf_counter() - start


if __name__ == "__main__":
    what, servers, topic, count = sys.argv[1:5]
    if what == "post":
        elapsed = uvloop.run(post(servers, topic, int(count), int(sys.argv[5])))
    else:
        elapsed = {"produce": produce, "consume": consume}[what](servers, topic, int(count))
    print(json.dumps({"records": int(count), "seconds": elapsed}))
