"""Bare loops around a table: what the machine can do without Headrace, each in a process of its own.

usage: python -m bench.bare_table LOOP BOOTSTRAP TOPIC RECORDS KEYS [FILE]
`fill` writes JSON objects of 200 bytes, with keys in turn; `steady` writes 10,000 of them a second, with random keys.
`latest` reads a topic into a DuckDB file by INSERT OR REPLACE, `log` by INSERT.
Prints JSON: records, seconds, cpu_seconds.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator

import confluent_kafka
import duckdb
import pyarrow as pa

from bench.bare import consumer, producer

COLUMNS = "id BIGINT, name STRING, city STRING, amount DOUBLE, active BOOLEAN, made BIGINT"
PER_SECOND, BURST = 10_000, 100
BATCH = 10_000
_TYPES = {
    "id": "BIGINT",
    "name": "VARCHAR",
    "city": "VARCHAR",
    "amount": "DOUBLE",
    "active": "BOOLEAN",
    "made": "BIGINT",
}


def value(number: int) -> bytes:
    """Return an object of 200 bytes."""
    text = (
        b'{"id": %d, "name": "customer %d", "city": "Amsterdam", "amount": %d.25, "active": true, "made": %d, "note": "'
    )
    return (text % (number, number, number % 1000, 1_790_000_000_000 + number)).ljust(198, b"x") + b'"}'


def key(number: int) -> bytes:
    return b"key-%d" % number


def write(client: confluent_kafka.Producer, topic: str, numbers: Iterable[tuple[int, int]]) -> None:
    for count, (number, key_number) in enumerate(numbers):
        while True:
            try:
                client.produce(topic, value(number), key(key_number))
                break
            except BufferError:
                client.poll(0.01)
        if not count % 1000:
            client.poll(0)


def steady(records: int, keys: int) -> Iterator[tuple[int, int]]:
    chance, start = random.Random(1), time.monotonic()
    for number in range(records):
        if not number % BURST and (ahead := start + number / PER_SECOND - time.monotonic()) > 0:
            time.sleep(ahead)
        yield number, chance.randrange(keys)


def keep(servers: str, topic: str, records: int, kind: str, file: str) -> float:
    """Read a topic into a file and return the seconds from the first record to the last."""
    table = duckdb.connect(file, config={"threads": "1", "memory_limit": "256MB"})
    primary = ", PRIMARY KEY(key)" if kind == "latest" else ""
    columns = ", ".join(f"{name} {of}" for name, of in _TYPES.items())
    table.execute(f"CREATE TABLE rows(key VARCHAR, part INTEGER, number BIGINT, written BIGINT, {columns}{primary})")
    insert = "INSERT OR REPLACE" if kind == "latest" else "INSERT"
    newest = "QUALIFY row_number() OVER (PARTITION BY key ORDER BY seq DESC) = 1" if kind == "latest" else ""
    cells = ", ".join(f"r.{name}" for name in _TYPES)
    row = f"from_json(value, '{json.dumps(_TYPES)}') AS r"
    client = consumer(servers, topic)
    seen = 0
    start = 0.0
    while seen < records:
        got = client.consume(BATCH, 1)
        start = start or (time.perf_counter() if got else 0.0)
        seen += len(got)
        batch = pa.table(
            {
                "seq": range(len(got)),
                "key": pa.array([record.key() for record in got], pa.binary()).cast(pa.string()),
                "value": pa.array([record.value() for record in got], pa.binary()).cast(pa.string()),
                "part": [record.partition() for record in got],
                "number": [record.offset() for record in got],
                "written": [record.timestamp()[1] for record in got],
            }
        )
        table.register("batch", batch)
        rows = f"SELECT *, {row} FROM batch {newest}"
        table.execute(f"{insert} INTO rows SELECT key, part, number, written, {cells} FROM ({rows})")
    seconds = time.perf_counter() - start
    client.close()
    table.close()
    return seconds


def main() -> None:
    what, servers, topic, records, keys, *file = sys.argv[1:]
    count = int(records)
    before = time.process_time()
    if what in ("latest", "log"):
        seconds = keep(servers, topic, count, what, file[0])
    else:
        client = producer(servers, topic)
        start = time.perf_counter()
        in_turn = ((number, number % int(keys)) for number in range(count))
        write(client, topic, in_turn if what == "fill" else steady(count, int(keys)))
        client.flush()
        seconds = time.perf_counter() - start
    print(json.dumps({"records": count, "seconds": seconds, "cpu_seconds": time.process_time() - before}))


if __name__ == "__main__":
    main()
