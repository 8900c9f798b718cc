"""A FastStream application that counts the records of a topic; with a target, it writes each to another topic.

usage: python faststream_app.py BOOTSTRAP TOPIC RECORDS [TARGET]
It is tuned: it takes batches of up to 500 bodies as they are, and the client waits 10 ms instead of a second before it
fetches again.
Prints a line with the first record; after the last, JSON: records, seconds between.
"""

import asyncio
import json
import sys
import time
from typing import Any

import uvloop
from faststream import FastStream, StreamMessage  # type: ignore[import-not-found]
from faststream.confluent import KafkaBroker  # type: ignore[import-not-found]

servers, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])


async def as_is(message: StreamMessage[Any]) -> Any:
    return message.body


broker = KafkaBroker(servers, logger=None, config={"fetch.queue.backoff.ms": 10}, decoder=as_is, apply_types=False)
app = FastStream(broker, logger=None)
seen, first = 0, 0.0


def add(records: int) -> None:
    global seen, first
    before, seen = seen, seen + records
    if not before:
        first = time.perf_counter()
        print("first", flush=True)
    if before < count <= seen:
        print(json.dumps({"records": count, "seconds": time.perf_counter() - first}), flush=True)


subscriber = broker.subscriber(
    topic, group_id=f"faststream-{time.time_ns()}", auto_offset_reset="earliest", batch=True, max_records=500
)
if sys.argv[4:]:
    publisher = broker.publisher(sys.argv[4], batch=True)

    @subscriber  # type: ignore[untyped-decorator]
    async def relay(bodies: list[bytes]) -> None:
        await publisher.publish(*bodies)
        add(len(bodies))

else:

    @subscriber  # type: ignore[untyped-decorator]
    async def handle(bodies: list[bytes]) -> None:
        add(len(bodies))


uvloop.install()
asyncio.run(app.run())
