"""Bare loops over the client: what the machine can do without Headrace, each in a process of its own.

usage: python -m bench.bare LOOP BOOTSTRAP TOPIC RECORDS
`produce` writes values of 100 bytes, `produce-kb` of 1,000, `produce-json` JSON objects of 100 bytes.
`produce-keys` writes values of 100 bytes with 5,003 keys in turns.
`consume` reads values, `call` calls a function with each, `consume-json` parses them, `relay` writes each to the topic
TOPIC-out.
`pool` parses them in a pool of two processes, `lines` writes them to the standard output.
`tick` writes a record every 20 ms, each holding the moment, `tick-slowly` every 200 ms.
`steady` writes 1,000 a second, of which none waits for the one before.
All but `lines` print JSON: records, seconds, cpu_seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, repeat
from typing import Any, NamedTuple

import confluent_kafka

JSON = b'{"id": 12345678, "name": "%s", "amount": 12.5, "tags": ["a", "b"], "active": true}' % (b"x" * 20)
"""100 bytes."""
KEYS = [b"%d" % number for number in range(5003)]


class Took(NamedTuple):
    """What a loop used between its first record and its last one; as a start, when it was."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> Took:
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> Took:
        return Took(*(now - then for now, then in zip(Took.now(), self, strict=True)))


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


def write(
    client: confluent_kafka.Producer,
    topic: str,
    values: Iterable[bytes | None],
    keys: Iterable[bytes | None] = repeat(None),
) -> None:
    for number, (value, key) in enumerate(zip(values, keys, strict=False)):
        while True:
            try:
                client.produce(topic, value, key)
                break
            except BufferError:
                client.poll(0.01)
        if not number % 1000:
            client.poll(0)


def produce(
    servers: str,
    topic: str,
    records: int,
    value: bytes = b'"' + b"x" * 98 + b'"',
    keys: Iterable[bytes | None] = repeat(None),
) -> Took:
    client = producer(servers, topic)
    start = Took.now()
    write(client, topic, repeat(value, records), keys)
    client.flush()
    return start.until_now()


def produce_kb(servers: str, topic: str, records: int) -> Took:
    return produce(servers, topic, records, b'"' + b"x" * 998 + b'"')


def produce_json(servers: str, topic: str, records: int) -> Took:
    return produce(servers, topic, records, JSON)


def produce_keys(servers: str, topic: str, records: int) -> Took:
    return produce(servers, topic, records, keys=cycle(KEYS))


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
) -> Took:
    client, seen, start = consumer(servers, topic), 0, None
    while seen < records:
        batch = client.consume(500, 1)
        start = start or (Took.now() if batch else None)
        use([record.value() for record in batch])
        seen += len(batch)
    end()
    took = (start or Took.now()).until_now()
    client.close()
    return took


def lines(servers: str, topic: str, records: int) -> Took:
    file = sys.stdout.buffer

    def use(values: Sequence[bytes]) -> None:
        file.write(b"".join([value + b"\n" for value in values]))

    return consume(servers, topic, records, use, file.flush)


def handle(context: None, body: bytes) -> None:
    """A handler that does nothing."""


def call(servers: str, topic: str, records: int) -> Took:
    def use(values: Sequence[bytes]) -> None:
        for value in values:
            handle(None, value)

    return consume(servers, topic, records, use)


def parse(values: Sequence[Any]) -> None:
    for value in values:
        json.loads(value)


def consume_json(servers: str, topic: str, records: int) -> Took:
    return consume(servers, topic, records, parse)


def pool(servers: str, topic: str, records: int) -> Took:
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        workers.map(parse, [[], []])
        pending: deque[Any] = deque()

        def use(values: Sequence[Any]) -> None:
            pending.append(workers.apply_async(parse, (values,)))
            while len(pending) > 8:
                pending.popleft().get()

        return consume(servers, topic, records, use, lambda: [each.get() for each in pending])


def relay(servers: str, topic: str, records: int) -> Took:
    target = f"{topic}-out"
    client = producer(servers, target)
    return consume(servers, topic, records, lambda values: write(client, target, values), client.flush)


def tick_slowly(servers: str, topic: str, records: int) -> Took:
    return tick(servers, topic, records, 0.2)


def steady(servers: str, topic: str, records: int) -> Took:
    client = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "linger.ms": 1})
    client.list_topics(topic)
    start = Took.now()
    begun = time.monotonic()
    for number in range(records):
        if (ahead := begun + number / 1000 - time.monotonic()) > 0:
            time.sleep(ahead)
        client.produce(topic, b"%d" % time.monotonic_ns(), partition=number % 8)
        client.poll(0)
    client.flush()
    return start.until_now()


def tick(servers: str, topic: str, records: int, pause_seconds: float = 0.02) -> Took:
    client = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "linger.ms": 0})
    partitions = len(client.list_topics(topic).topics[topic].partitions)
    start = Took.now()
    for number in range(records):
        client.produce(topic, b"%d" % time.monotonic_ns(), partition=number % partitions)
        client.flush()
        time.sleep(pause_seconds)
    return start.until_now()


LOOPS: dict[str, Callable[[str, str, int], Took]] = {
    "produce": produce,
    "produce-kb": produce_kb,
    "produce-json": produce_json,
    "produce-keys": produce_keys,
    "consume": consume,
    "call": call,
    "consume-json": consume_json,
    "lines": lines,
    "pool": pool,
    "relay": relay,
    "tick": tick,
    "tick-slowly": tick_slowly,
    "steady": steady,
}

if __name__ == "__main__":
    what, servers, topic, count = sys.argv[1:]
    took = LOOPS[what](servers, topic, int(count))
    if what != "lines":
        print(json.dumps({"records": int(count), **took._asdict()}))
