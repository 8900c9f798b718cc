"""A record that Kafka refuses fails alone, whatever the client says of the others of its batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError as ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka.client import library
from headrace.kafka.producer import Producer
from headrace.records import OutgoingRecord, Produced
from headrace.runtime import Deadline, SystemClock

REASONS = ClientError.INVALID_RECORD, ClientError.INVALID_TIMESTAMP, ClientError.MSG_SIZE_TOO_LARGE


class Client:
    """Reports as librdkafka: one refused record of a batch is reported of all, several are named singly."""

    def __init__(
        self, properties: dict[str, Any], log: list[bytes], tries: Counter[bytes], cuts: Random, reason: int
    ) -> None:
        self.alone = properties["batch.size"] == 1
        self.log, self.tries, self.cuts, self.reason = log, tries, cuts, reason
        self.waiting: list[tuple[bytes, Any]] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def produce(self, _topic: str, value: bytes, *rest: Any) -> None:
        self.waiting.append((value, rest[2]))

    def flush(self, _seconds: float) -> None:
        while self.waiting:
            size = 1 if self.alone else self.cuts.randint(1, len(self.waiting))
            batch = [self.waiting.pop(0) for _ in range(size)]  # while the loop adds others
            self.tries.update(value for value, _ in batch)
            bad = [value.startswith(b"bad") for value, _ in batch]
            several = sum(bad) > 1 and self.reason != ClientError.MSG_SIZE_TOO_LARGE
            for is_bad, (value, report) in zip(bad, batch, strict=True):
                code = self.reason if is_bad or not several else ClientError._INVALID_DIFFERENT_RECORD
                self.log += [] if any(bad) else [value]
                record = SimpleNamespace(topic=lambda: "t", partition=lambda: 0, offset=lambda: 0)
                record.key = record.headers = lambda: None
                record.value = lambda value=value: value
                report(ClientError(code) if any(bad) else None, record)

    poll = flush

    def purge(self, *, in_flight: bool) -> None:
        pass


async def written(requests: Sequence[Sequence[bytes]], in_order: bool) -> list[list[Any]]:
    """Return the results of requests that are written at the same time."""
    producer = Producer(KafkaConfig(native="off"), ProducerConfig())
    await producer.start()
    records = [[OutgoingRecord("t", b"k", value) for value in values] for values in requests]
    results = await asyncio.gather(*(producer.produce(each, in_order=in_order) for each in records))
    await producer.drain(Deadline(SystemClock(), 60))
    assert producer.pending_bytes == 0
    await producer.stop()
    return results


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    bad=st.sets(st.integers(0, 179), max_size=12) | st.just({*range(180)}),
    reason=st.sampled_from(REASONS),
    seed=st.integers(0, 99),
    in_order=st.booleans(),
)
def test_only_what_fails_alone_has_failed(
    sizes: list[int], bad: set[int], reason: int, seed: int, in_order: bool
) -> None:
    """Each other record is written, at most one more time is tried, and the order of a key is kept where it must be."""
    names = [(b"bad%d" if number in bad else b"%d") % number for number in range(180)]
    ends = [*accumulate(sizes)]
    requests = [names[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    log, tries = list[bytes](), Counter[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "Producer", lambda properties: Client(properties, log, tries, Random(seed), reason))
        results = asyncio.run(written(requests, in_order))
    good = [[value for value in values if not value.startswith(b"bad")] for values in requests]
    for values, found, taken in zip(requests, results, good, strict=True):
        assert [value for value, result in zip(values, found, strict=True) if isinstance(result, Produced)] == taken
        if in_order:
            assert sorted(taken, key=lambda value: log[::-1].index(value)) == taken[::-1], "in their order"
    assert sorted({*log} if in_order else log) == sorted(value for taken in good for value in taken)
    assert max(tries.values()) <= 2


async def test_a_refused_batch_ends_while_no_further_client_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when descriptors or files are missing: its requests end, and so do those that ended with it."""

    def client(properties: dict[str, Any]) -> Client:
        if properties["batch.size"] == 1:
            raise confluent_kafka.KafkaException(ClientError(ClientError._FAIL))
        return Client(properties, [], Counter(), Random(0), ClientError.INVALID_RECORD)

    monkeypatch.setattr(library, "Producer", client)
    async with asyncio.timeout(5):
        results = await written([[b"bad"], [b"0"]], in_order=False)
    assert all(isinstance(result, Produced | KafkaUnavailable) for each in results for result in each)
