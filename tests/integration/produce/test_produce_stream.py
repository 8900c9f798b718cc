"""Streams of records into a real broker: order, bounds, stops, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace_devkit.testing import MakeTopic, SharedHeadrace, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.faults.ledger import Poster
from tests.ndjson_client import NdjsonClient


async def exchange(url: str, topic: str, records: list[Any]) -> list[Any]:
    async with NdjsonClient.open(url, topic) as client:
        _, receipts = await asyncio.gather(client.send_all(records), client.receipts())
    return receipts


def test_every_receipt_is_where_its_line_is(site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """Many partitions, and a produce budget much smaller than the stream: it waits, and nothing is refused."""
    name = topic(6)
    url = headrace({**site.config, "producer": {"max_pending_bytes": 100_000}}).url
    records = [{"key": f"k{n}", "value": {"n": n, "pad": "x" * (n % 700)}} for n in range(6_000)]
    receipts = asyncio.run(exchange(url, name, records))
    written = {(record.partition, record.offset): json.loads(record.value)["n"] for record in site.records(name)}
    assert [written[receipt["partition"], receipt["offset"]] for receipt in receipts] == [*range(6_000)]
    assert len(written) == 6_000
    for partition in range(6):
        offsets = [receipt["offset"] for receipt in receipts if receipt["partition"] == partition]
        assert offsets == [*range(len(offsets))]


def test_a_client_that_does_not_read_is_not_read_from(
    site: Scenario, topic: MakeTopic, module_headrace: SharedHeadrace
) -> None:
    """What it sends waits on its own side, memory stays bounded; it goes, and nothing of it is left."""
    name = topic()
    process = module_headrace(site.config)
    asyncio.run(exchange(process.url, name, [{"value": 0}] * 1000))  # what the process needs once is there
    before = resident_bytes(process.server.id.pid)

    async def main() -> None:
        async with NdjsonClient.open(process.url, name) as client:
            with contextlib.suppress(TimeoutError):
                while True:
                    client.chunk(b"{}\n" * 20_000)
                    await asyncio.wait_for(client.writer.drain(), 2)
            client.writer.transport.abort()

    asyncio.run(main())
    assert resident_bytes(process.server.id.pid) < before + 100_000_000
    site.wait_until(lambda: not connections_to(process), "the connection to be closed")
    assert "offset" in asyncio.run(exchange(process.url, name, [{"value": "after"}]))[0]
    assert "Traceback" not in process.output


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def connections_to(process: Any) -> int:
    """Return how many clients are connected. Source: proc_pid_net(5), field 4: 01 is ESTABLISHED, 08 CLOSE_WAIT."""
    place = f":{urlsplit(process.url).port:04X}"
    lines = Path(f"/proc/{process.server.id.pid}/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(place) and line.split()[3] in ("01", "08") for line in lines)


def test_a_stop_loses_nothing_and_doubles_nothing(site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """While clients produce: every ok is at its offset, whatever got no ok is not there, and the exit code is 0."""
    name = topic()
    process = headrace(site.config)
    with Poster(process.url, name, batch=1, clients=8) as poster:
        poster.wait_for_more(100)
        assert process.terminate() == 0
    written = {(sent.partition, sent.offset): sent.value for sent in poster.with_outcome()}
    assert {(record.partition, record.offset): record.value for record in site.records(name)} == written


def test_a_drain_answers_what_was_taken_and_says_where_it_stopped(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace
) -> None:
    """Receipts without a gap, then one line with the number of the first line that was not taken; exit code 0."""
    name = topic()
    process = headrace(site.config)

    async def main() -> list[Any]:
        receipts = []
        async with NdjsonClient.open(process.url, name) as client:

            async def write() -> None:
                for start in itertools.count(0, 50):
                    client.chunk(b"".join(b'{"value":%d}\n' % n for n in range(start, start + 50)))
                    await client.writer.drain()
                    await asyncio.sleep(0.001)

            writing = asyncio.ensure_future(write())
            while (receipt := await client.receipt()) is not None:
                receipts.append(receipt)
                if len(receipts) == 500:
                    ended = asyncio.get_running_loop().run_in_executor(None, process.terminate)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        assert await ended == 0
        return receipts

    *receipts, last = asyncio.run(main())
    assert [receipt["offset"] for receipt in receipts] == [*range(len(receipts))]
    assert (last["line"], last["end"], last["code"]) == (len(receipts) + 1, True, "ERR40029")
    assert [json.loads(record.value) for record in site.records(name)] == [*range(len(receipts))]
    assert "Traceback" not in process.output
