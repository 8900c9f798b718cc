"""A cluster in memory with what a redrive and a redelivery need of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.errors import KafkaTimeout, LeaseLost, RecordRefused, RecordTooLarge, TransactionAborted
from headrace.records import Header, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runs import redrive, redrive_writers, replay
from headrace.runs.dead_letters import completed_offsets, pages
from headrace.runs.dead_letters.completed_offsets import COMPLETED_TOPIC, NOTHING_COMPLETED, CompletedOffsets
from headrace.runs.replay import RunContext
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from headrace_dialects.light4j.redelivery import Redelivery, RedeliveryRequest, RedeliveryResponse
from tests.control_harness import running

DLQ = "orders.dlq"
HOUR_MS = 3_600_000


class FakeKafka(MemoryCluster):
    """A cluster with dead letters. Tests choose which writes fail and when a lease is lost."""

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
        self.events: list[str] = []
        """What was done, in its order."""

    def letter(
        self,
        number: int,
        *,
        topic: str = "orders",
        headers: Sequence[Header] = (),
        partition: int = 0,
        group: str = "billing",
        at_ms: int = 9,
        attempts: int = 5,
    ) -> None:
        """Append one dead letter of a record `number` whose original topic is `topic`."""
        origin = Record(topic, 1, number, 5, f"k{number}".encode(), f"v{number}".encode(), lambda: list(headers))
        outcome = Reply(f"E{number % 2}", "no", permanent=True)
        self.dead(partition, origin, headers_of(DeadLetter(origin, group, attempts, outcome, 1.0, 2.0)), at_ms)

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
            self.events.append("save")
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
        return asyncio.run(self.completed())

    async def completed(self) -> set[int]:
        found = CompletedOffsets(self, DLQ)  # type: ignore[arg-type]
        await found.load()
        return {o for o in range(len(self.logs.get(TopicPartition(DLQ, 0), []))) if found.is_completed(0, o)}


class FakeLease:
    def __init__(self, fake: FakeKafka) -> None:
        self._fake = fake
        self.holder = fake.holder

    async def acquire(self, limit_seconds: float = 0.0) -> bool:
        self._fake.lease_held = not self._fake.holder
        self._fake.events.append("lease")
        return self._fake.lease_held

    async def check(self) -> None:
        self._fake.lease_checks -= 1
        if self._fake.lease_checks < 0:
            raise LeaseLost()

    async def release(self) -> None:
        self._fake.events.append("release")
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


class RedeliveryHarness(FakeKafka):
    """Dead letters, the backend of their consumers, and the service that delivers them to it."""

    def __init__(self, respond: Callable[[Sequence[int]], Sequence[Reply]] | None = None, **settings: Any) -> None:
        """Prepare; `respond` gets the offsets of a delivery, `settings` belong to the consumer of group `billing`."""
        super().__init__()
        self.respond = respond or (lambda offsets: [ACK] * len(offsets))
        self.free = asyncio.Event()
        """While it is not set, deliveries hang."""
        self.free.set()
        self.deliveries: list[Delivery] = []
        self.writer = SimpleNamespace(write=AsyncMock())
        self.clock = ManualClock()
        self.reads = self.records_read = 0
        self.seconds_per_read = 0.0
        self.silent = False
        self.consumers = {"billing": self.consumer(**settings), "other": self.consumer(group="other")}
        context = RunContext(self, self.produce, self.produce, self.clock)  # type: ignore[arg-type]
        self._service = Redelivery(context, self.consumers, "h")

    def consumer(self, *, dead_letters: bool = True, **settings: Any) -> RunningConsumer:
        base = {"topics": ["orders", "missing"], "group": "billing", "backend": {"url": "http://127.0.0.1:1"}}
        limits = {"batch": {"max_records": 3, "max_bytes": 100}}
        config = ReactiveConsumerConfig.model_validate({**base, **limits, **settings})
        no_replay = "its backend keeps offsets" if config.backend.offsets_path else ""
        writer = self.writer if dead_letters else None
        made = running(
            config, self, admin=self, no_replay=no_replay, dead_letters=writer, dead_letter=config.dead_letter
        )
        made.pump.on_assigned({TopicPartition("orders", 1): 7}, {})
        return made

    async def call(self, **request: Any) -> RedeliveryResponse:
        """Request some batches."""
        return await self._service.run(RedeliveryRequest(**{"group": "billing", **request}))

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.events.append("deliver")
        self.deliveries.append(delivery)
        await self.free.wait()
        return self.respond([record.offset for record in delivery.records])

    @property
    def delivered(self) -> list[list[int]]:
        return [[record.offset for record in delivery.records] for delivery in self.deliveries]

    @property
    def written_again(self) -> list[int]:
        """Offsets of the records that were written as dead letters again."""
        return [one.record.offset for call in self.writer.write.await_args_list for one in call.args[0]]

    def mark(self, offsets: Iterable[int]) -> None:
        """Complete dead letters of partition 0."""
        self.partitions[COMPLETED_TOPIC] = 1
        completed = CompletedOffsets(self, DLQ)  # type: ignore[arg-type]
        completed.begin(self.ids[DLQ])
        for record in completed.records_for({0: offsets}):
            self.write(record)

    async def read(self, kafka: KafkaConfig, starts: Any, ends: Any) -> AsyncGenerator[list[Record], None]:
        self.reads += 1
        if self.silent:
            await asyncio.Event().wait()
        await self.clock.advance(self.seconds_per_read)
        async for batch in super().read(kafka, starts, ends):
            self.records_read += len(batch)
            yield batch


def install(fake: FakeKafka, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(completed_offsets, "read_back", fake.read_back)
    patch.setattr(redrive, "read_window", fake.read)
    patch.setattr(replay, "read_records", fake.read)
    patch.setattr(pages, "read_window", fake.read)
    patch.setattr(completed_offsets, "Lease", lambda *_, **__: FakeLease(fake))
    patch.setattr(redrive_writers, "TransactionSession", lambda *_, **__: FakeSession(fake))
