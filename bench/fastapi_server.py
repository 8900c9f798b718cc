"""What most people would write: FastAPI, a model per record, a future per record.

usage: python -m bench.fastapi_server BOOTSTRAP
Prints its port.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from typing import Any

import confluent_kafka
import fastapi
import pydantic
import uvicorn

from bench.bare_server import SETTINGS


class Entry(pydantic.BaseModel):
    """One record of a request."""

    value: Any


class Request(pydantic.BaseModel):
    """A request's body."""

    records: list[Entry]


app = fastapi.FastAPI()
client = confluent_kafka.Producer({"bootstrap.servers": sys.argv[1], **SETTINGS})


def poll() -> None:
    while True:
        client.poll(0.1)


@app.post("/producers/{topic}")
async def produce(topic: str, request: Request) -> dict[str, Any]:
    loop = asyncio.get_running_loop()

    def write(entry: Entry) -> asyncio.Future[dict[str, int]]:
        future: asyncio.Future[dict[str, int]] = loop.create_future()

        def reported(error: Any, record: Any) -> None:
            written = {"partition": record.partition(), "offset": record.offset()}
            loop.call_soon_threadsafe(future.set_result, written)

        client.produce(topic, fastapi.encoders.jsonable_encoder(entry.value), on_delivery=reported)
        return future

    return {"offsets": await asyncio.gather(*map(write, request.records)), "requestStatus": "OK"}


if __name__ == "__main__":
    threading.Thread(target=poll, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    server.run([listener])
