"""`headrace.client` against a real process and broker, also over connections that end before the response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.client import HeadraceClient, NewRecord, RetryPolicy
from headrace.errors import CommitRefused, InstanceExists, InstanceNotFound, RecordTooLarge, TopicNotFound
from headrace.records import Produced, TopicPartition
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.raw_server import served_by_thread

CONFIG = {"active_consumers": {"auto_offset_reset": "earliest"}}


@pytest.fixture
def url(site: Scenario, headrace: StartHeadrace) -> str:
    return headrace({**site.config, **CONFIG}).url


class CuttingProxy:
    """Forwards HTTP connections; `cut` ends some after a number of bytes of their response."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.cuts = 0
        self._port = port
        self._wanted: list[tuple[bytes, int]] = []

    def cut(self, request: bytes, after_bytes: int = 0, times: int = 1) -> None:
        """End the connections of the next requests that begin so: their responses end here, complete."""
        self._wanted += [(request, after_bytes)] * times

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, service = await asyncio.open_connection("127.0.0.1", self._port)
        left = float("inf")

        async def requests() -> None:
            nonlocal left
            while data := await reader.read(65536):
                for wanted in self._wanted:
                    if data.startswith(wanted[0]):
                        left = wanted[1]
                        self._wanted.remove(wanted)
                        break
                service.write(data)

        async def responses() -> None:
            nonlocal left
            while data := await upstream.read(65536):
                if left < len(data):
                    writer.write(data[: int(left)])
                    self.cuts += 1
                    await asyncio.sleep(0.1)  # the service has written the response completely
                    return
                left -= len(data)
                writer.write(data)

        both = [asyncio.ensure_future(requests()), asyncio.ensure_future(responses())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            service.close()
            writer.close()


@pytest.fixture
def proxy(url: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(int(url.rpartition(":")[2]))
    with served_by_thread(proxy.talk) as port:
        proxy.url = f"http://127.0.0.1:{port}"
        yield proxy


@pytest.fixture
def client(proxy: CuttingProxy) -> Iterator[HeadraceClient]:
    with HeadraceClient(proxy.url) as client:
        yield client


def read(consumer: Any, count: int) -> list[Any]:
    return [next(records).value for records in [iter(consumer)] for _ in range(count)]


def test_a_loop_reads_and_commits_each_record(client: HeadraceClient, site: Scenario, topic: MakeTopic) -> None:
    """What was not yielded is not committed, and comes to the next member of the group."""
    name = topic()
    only = TopicPartition(name, 0)
    assert client.produce(name, {"n": 0}, "k") == Produced(0, 0)
    written = client.produce_all(name, [NewRecord({"n": n}, headers={"a": "b"}) for n in (1, 2, 3)])
    offsets = [produced.offset for produced in written]  # the end of the first transaction has an offset too
    with client.consumer(name, [name]) as consumer:
        for record in consumer:
            consumer.commit()
            if record.value["n"] == 1:
                break
        assert (record.headers["a"], record.key, record.offset) == ("b", None, offsets[0])
        assert consumer.committed([only]) == {only: offsets[0] + 1}
    with client.consumer(name, pattern=name) as consumer:
        assert read(consumer, 2) == [{"n": 2}, {"n": 3}]
        assert consumer.commit() == {only: offsets[2] + 1}
        assert consumer.commit() == {}
        consumer.seek({only: offsets[2]})
        assert read(consumer, 1) == [{"n": 3}]
        consumer.seek_first()
        assert read(consumer, 1) == [{"n": 0}]


def test_errors_are_those_of_the_service(client: HeadraceClient, topic: MakeTopic) -> None:
    """With code, status and description, and no attempt more than needed."""
    name = topic(1, max_message_bytes=2000)
    with pytest.raises(TopicNotFound) as missing:
        client.produce(f"{name}-none", 1)
    assert (missing.value.status, missing.value.code) == (404, "ERR40006")
    assert missing.value.parameters["topic"] == f"{name}-none"
    with pytest.raises(RecordTooLarge):
        client.produce_all(name, [NewRecord(1), NewRecord("x" * 5000)])
    with client.consumer(name, [name], name="one"):
        with pytest.raises(InstanceExists), client.consumer(name, [name], name="one"):
            pass
        with pytest.raises(InstanceNotFound), client.consumer(name, [name]) as other:
            other.close()
            other.operations.id = "gone"
            other.read()


def test_a_response_that_was_lost_repeats_nothing(
    client: HeadraceClient, proxy: CuttingProxy, site: Scenario, topic: MakeTopic
) -> None:
    """No record twice, none skipped, no instance too many, and every commit is made."""
    name, target = topic(), topic()
    proxy.cut(b"POST /producers/", times=2)
    assert client.produce_all(name, [NewRecord(n) for n in range(6)])[0] == Produced(0, 0)
    proxy.cut(b"POST /consumers/")
    with client.consumer(name, [name], autoOffsetReset="earliest") as consumer:
        proxy.cut(f"GET {consumer.operations.path}/records".encode(), times=2)
        first = [record.value for record in consumer.read(20, max_records=2)]
        proxy.cut(f"GET {consumer.operations.path}/records".encode(), after_bytes=200)
        second = [record.value for record in consumer.read(20, max_records=2)]
        assert (first, second) == ([0, 1], [2, 3])
        proxy.cut(b"POST /transactions")
        assert client.transaction({target: [NewRecord("once")]}, consumer)[target] == [Produced(0, 0)]
        assert read(consumer, 2) == [4, 5]
        proxy.cut(f"POST {consumer.operations.path}/offsets".encode())
        assert consumer.commit() == {TopicPartition(name, 0): 6}
        assert "headrace_active_instances 1" in site.ask(f"{proxy.url}/metrics").body.replace(".0", "")
        proxy.cut(b"DELETE /consumers/")
    assert proxy.cuts == 9
    site.wait_committed(name, name, 6)
    assert "headrace_active_instances 0" in site.ask(f"{proxy.url}/metrics").body.replace(".0", "")
    assert [json.loads(record.value) for record in site.records(target)] == ["once"]
    assert len(site.records(name)) == 6


def test_attempts_are_bounded(proxy: CuttingProxy, topic: MakeTopic) -> None:
    """The error of the connection is raised after the last; nothing was written that was not meant."""
    import httpx

    name = topic()
    proxy.cut(b"POST /producers/", times=10)
    with HeadraceClient(proxy.url, retries=RetryPolicy(3, 0.01, 0.02)) as client, pytest.raises(httpx.TransportError):
        client.produce(name, 1)
    assert proxy.cuts == 3


def test_a_refused_transaction_loses_and_repeats_nothing(
    client: HeadraceClient, site: Scenario, topic: MakeTopic
) -> None:
    """One of two partitions was revoked: the records of the other come again, to the same consumer."""
    name, target = topic(2), topic()
    for partition in range(2):
        client.produce_all(name, [NewRecord([partition, n], partition=partition) for n in range(20)])
    with client.consumer(name, [name]) as consumer:
        batch = read(consumer, 40)
        with client.consumer(name, [name]) as other:
            site.wait_until(lambda: len(other.assigned()) == 1 and len(consumer.assigned()) == 1, "a partition each")
            with pytest.raises(CommitRefused):
                client.transaction({target: [NewRecord(value) for value in batch]}, consumer)
            for one in (consumer, other):
                client.transaction({target: [NewRecord(value) for value in read(one, 20)]}, one)
    written = sorted(json.loads(record.value) for record in site.records(target))
    assert written == [[partition, n] for partition in range(2) for n in range(20)]
