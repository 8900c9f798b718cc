"""A cluster in memory with what a redrive needs of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.control.dead_letters import completed_offsets
from headrace.control.dead_letters.completed_offsets import COMPLETED_TOPIC, NOTHING_COMPLETED, CompletedOffsets
from headrace.control.runs import redrive, redrive_writers
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.errors import KafkaTimeout, LeaseLost, RecordRefused, RecordTooLarge, TransactionAborted
from headrace.records import Header, OutgoingRecord, Produced, Record, TopicPartition
from headrace.testing.memory_cluster import MemoryCluster

DLQ = "orders.dlq"
HOUR_MS = 3_600_000


class FakeKafka(MemoryCluster):
    """A cluster with dead letters, whose writes and leases fail as they are told."""

    config = KafkaConfig()

    def __init__(self) -> None:
        super().__init__({"orders": 2, DLQ: 2})
        self.ids = {DLQ: "first"}
        self.produced: list[OutgoingRecord] = []
        self.sends: list[int] = []
        self.fail_at: set[int] = set()
        self.too_large: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.calls = 0
        self.holder = ""
        self.lease_held = False
        self.lease_checks = 10**9
        self.commits: list[str] = []

    def letter(
        self,
        number: int,
        *,
        topic: str = "orders",
        headers: Sequence[Header] = (),
        partition: int = 0,
        group: str = "billing",
        at_ms: int = 9,
    ) -> None:
        """Append one dead letter of a record `number` that came from `topic`."""
        origin = Record(topic, 1, number, 5, f"k{number}".encode(), f"v{number}".encode(), lambda: list(headers))
        outcome = Reply(f"E{number % 2}", "no", permanent=True)
        self.dead(partition, origin, headers_of(DeadLetter(origin, group, 5, outcome, 1.0, 2.0)), at_ms)

    def dead(self, partition: int, origin: Record, headers: list[Header], at_ms: int = 9) -> None:
        self.write(OutgoingRecord(DLQ, origin.key, origin.value, headers, partition), at_ms)

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        if records == [NOTHING_COMPLETED]:
            return [Produced(0, 0)]
        self.sends.append(len(records))
        return [self._write(record) for record in records]

    def _write(self, record: OutgoingRecord) -> Any:
        self.calls += 1
        if self.calls in self.fail_at:
            return KafkaTimeout("no response")
        if record.value in self.refused:
            return RecordRefused("no key")
        if record.value in self.too_large:
            return RecordTooLarge("too large")
        if record.topic == COMPLETED_TOPIC:
            self.write(record)
        else:
            self.produced.append(record)
        return Produced(0, 0)

    async def read_back(self, admin: Any, topic: Any, *, settled: bool) -> AsyncGenerator[list[Record], None]:
        if records := self.logs.get(TopicPartition(topic.name, 0), []):
            yield records

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.produced]

    def ended(self) -> set[int]:
        """Return the offsets of partition 0 that a new process finds marked."""
        found = CompletedOffsets(self, DLQ)  # type: ignore[arg-type]
        asyncio.run(found.load())
        return {o for o in range(len(self.logs.get(TopicPartition(DLQ, 0), []))) if found.is_completed(0, o)}


class FakeLease:
    def __init__(self, fake: FakeKafka) -> None:
        self._fake = fake
        self.holder = fake.holder

    async def acquire(self, limit_seconds: float = 0.0) -> bool:
        self._fake.lease_held = not self._fake.holder
        return self._fake.lease_held

    async def check(self) -> None:
        self._fake.lease_checks -= 1
        if self._fake.lease_checks < 0:
            raise LeaseLost()

    async def release(self) -> None:
        self._fake.lease_held = False


class FakeSession:
    """All records of a request are written, or none; what happens to each commit is scripted."""

    def __init__(self, fake: FakeKafka) -> None:
        self._fake = fake
        self._over = False

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        self._over = True

    def submit(self, records: Sequence[OutgoingRecord]) -> asyncio.Future[list[Any]]:
        response: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        what = self._fake.commits.pop(0) if self._fake.commits else "commit"
        large = [
            RecordTooLarge("too large") if r.value in self._fake.too_large else TransactionAborted() for r in records
        ]
        if self._over or what == "abort" or any(isinstance(result, RecordTooLarge) for result in large):
            response.set_result(large)
        else:
            written = [self._fake._write(record) for record in records]
            response.set_result([KafkaTimeout("in doubt")] * len(records) if what == "doubt" else written)
        self._over = self._over or response.result()[0].__class__ is not Produced
        return response


def install(fake: FakeKafka, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(completed_offsets, "read_back", fake.read_back)
    patch.setattr(redrive, "read_window", fake.read)
    patch.setattr(completed_offsets, "Lease", lambda *_, **__: FakeLease(fake))
    patch.setattr(redrive_writers, "TransactionSession", lambda *_, **__: FakeSession(fake))
