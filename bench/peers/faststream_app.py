"""A FastStream application that does nothing with each record, and counts them.

usage: python faststream_app.py BOOTSTRAP TOPIC RECORDS
Prints a line with the first record; after the last, JSON: records, seconds between.
"""

import asyncio
import json
import sys
import time

import uvloop
from faststream import FastStream
from faststream.confluent import KafkaBroker

servers, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
broker = KafkaBroker(servers, logger=None)
app = FastStream(broker, logger=None)
seen, first = 0, 0.0


@broker.subscriber(topic, group_id=f"faststream-{time.time_ns()}", auto_offset_reset="earliest")
async def handle(body: str) -> None:
    global seen, first
    seen += 1
    if seen == 1:
        first = time.perf_counter()
        print("first", flush=True)
    if seen == count:
        print(json.dumps({"records": count, "seconds": time.perf_counter() - first}), flush=True)


uvloop.install()
asyncio.run(app.run())
