"""Backends that break HTTP at some records: each record is judged by the response to it alone."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import re
import time
from collections import Counter
from typing import get_args

from headrace.config.backend import BackendMode
from headrace.records import OutgoingRecord
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


RECORDS, PARTITIONS = 240, 4
STATUSES = {58: 400, 59: 500, **dict.fromkeys(range(3, RECORDS, 11), 422)}
CLOSED = 17
DEEP = b"[" * 900 + b"]" * 900
HARD: dict[int, tuple[bytes | None, bytes, list[tuple[str, bytes | None]], bool]] = {
    # By number: key, value, headers, whether it is sent
    20: (b"\xff", b'{"n":20}', [], False),
    41: (b"k", b'{"n":41', [], False),
    62: (b"k", b'{"n":62,"a":"\xed\xa0\x80"}', [], False),
    83: (b"k", b'{"n":83,"a":"\\ud800"}', [], False),
    104: (b"k\r\n\x00", b'{"n":104}', [("h\r\n", b"\xff\r\n\x00"), ("h", None), ("", b"")], True),
    125: (None, b'{"n":125,"a":"%b"}' % (b"x" * 900_000), [], True),
    126: (b"k" * 5000, b'{"n":126,"a":1e999,"b":%b}' % (b"9" * 5000), [("h", b"x" * 20_000)], True),
    147: (b"k", b'{"n":147,"a":%b}' % DEEP, [], True),
}


async def judge(accepted: set[tuple[str, int]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Judge each record by its number; answer a fifth of the requests twice, the second time 0 to 5 ms later."""
    connection = Server()
    while True:
        await connection.request(reader)
        head, body = connection.requests[-1]
        path, numbers = head.split(" ")[1], [int(n) for n in re.findall(rb'"n":\s*(\d+)', body)]
        if CLOSED in numbers:
            return
        status, good = 200, [n for n in numbers if n not in STATUSES]
        text = b""
        if "results" in path:
            text = json.dumps([{"processed": n in good, "permanent": True} for n in numbers]).encode()
        elif good != numbers:
            status, good = max(STATUSES.get(n, 200) for n in numbers), []
        accepted.update((path, n) for n in good)
        response = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(text), text)
        start = time.monotonic()
        writer.write(response)
        if sum(numbers) % 5 == 0:
            if sum(numbers) % 2:
                await asyncio.sleep(sum(numbers) % 6 / 1000)
            if time.monotonic() - start < 0.006:  # a busy machine is later, and then nothing is promised
                writer.write(response)
        await writer.drain()


def test_each_record_is_judged_by_its_own_response(site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """In every mode and order, beside records that are refused, break the connection, or cannot be sent."""
    name, accepted = topic(PARTITIONS), set[tuple[str, int]]()
    plain = {n: (b"k%d" % (n % 9), b'{"n":%d}' % n, [], True) for n in range(RECORDS)}
    sent = {**plain, **HARD}
    site.write(name, *(OutgoingRecord(name, *parts[:3], n % PARTITIONS) for n, parts in sent.items()))
    dead = {n for n in range(RECORDS) if n in STATUSES or n == CLOSED or not sent[n][3]}
    kinds = [
        f"{mode}-{order}" for mode, order in itertools.product(get_args(BackendMode), ("partition", "key", "none"))
    ]
    with served_by_thread(functools.partial(judge, accepted)) as port:
        consumers = {
            kind: {
                "topics": [name],
                "group": f"{name}-{kind}",
                "ordering": kind.partition("-")[2],
                "retry": {"attempts": 2, "first_delay_seconds": 0.02, "max_delay_seconds": 0.1},
                "backend": {"mode": kind.partition("-")[0], "url": f"http://127.0.0.1:{port}/{kind}"},
            }
            for kind in kinds
        }
        process = headrace({**site.config, "reactive_consumers": consumers})
        for kind, partition in itertools.product(kinds, range(PARTITIONS)):
            site.wait_committed(f"{name}-{kind}", name, RECORDS // PARTITIONS, partition)
        process.kill()
    letters = Counter[tuple[str, int]]()
    for letter in site.records(f"{name}.dlq"):
        told = {key.removeprefix("headrace.dlq."): (value or b"").decode() for key, value in letter.headers}
        kind, number = told["group"].removeprefix(f"{name}-"), int(told["offset"]) * PARTITIONS + int(told["partition"])
        letters[kind, number] += 1
    assert letters == Counter(itertools.product(kinds, dead))
    assert accepted == {(f"/{kind}", n) for kind in kinds for n in range(RECORDS) if n not in dead}
