"""A backend that closes the connection at one record: only that record is judged by it."""

from __future__ import annotations

import asyncio
import json

from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from raw_server import Server, served_by_thread

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class FatalRecord:
    """A server that closes the connection at one record, and keeps all other requests."""

    def __init__(self, fatal: bytes) -> None:
        self.fatal = fatal
        self.accepted: list[tuple[str, bytes]] = []
        """Head and body."""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Server()
        while True:
            await connection.request(reader)
            request = connection.requests[-1]
            if self.fatal in request[1]:
                return
            self.accepted.append(request)
            writer.write(OK)
            await writer.drain()


def test_a_record_at_which_the_backend_closes_the_connection_ends_alone(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace
) -> None:
    """It is the first, so nothing else is accepted meanwhile: before it is sent alone, the backend gets OPTIONS."""
    name, server = topic(), FatalRecord(b'"offset":0')
    site.write_json(name, *range(5))
    with served_by_thread(server.talk) as port:
        push = {
            "topics": [name],
            "group": name,
            "retry": {"attempts": 2, "first_delay_seconds": 0.02, "max_delay_seconds": 0.1},
            "backend": {"mode": "status", "url": f"http://127.0.0.1:{port}/in"},
        }
        process = headrace({**site.config, "reactive_consumers": {"push": push}})
        site.wait_committed(name, name, 5)
        site.wait_until(lambda: site.reasons(process.url) == {}, "readiness")
        process.kill()
    posts = [json.loads(body) for head, body in server.accepted if head.startswith("POST")]
    # A response may be late on a busy machine, and its request be repeated.
    assert list(dict.fromkeys(entry["offset"] for body in posts for entry in body)) == [1, 2, 3, 4]
    assert {head.split(" ")[1] for head, _ in server.accepted if head.startswith("OPTIONS")} == {"/in"}
    (dead,) = site.records(f"{name}.dlq")
    history = dict(dead.headers)
    assert (history["headrace.dlq.error"], history["headrace.dlq.attempts"]) == (b"ConnectionClosed", b"2")
    assert b"it closed the connection without a response" in history["headrace.dlq.reason"]
