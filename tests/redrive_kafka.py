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
from headrace.errors import HeadraceError, KafkaTimeout, LeaseLost, RecordRefused, RecordTooLarge
from headrace.kafka import compacted_table
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


class DeadLetterCluster(MemoryCluster):
    """A cluster with dead letters. Tests choose which writes fail and when a lease is lost."""

    def __init__(self) -> None:
        super().__init__({"orders": 2, DLQ: 2})
        self.brokers.topics[DLQ].id = "first"
        self.producer.refusal = self._refusal
        self.sends: list[int] = []
        """How many records each call had."""
        self.fail_at: set[int] = set()
        self.too_large: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.calls = 0
        self.holder = ""
        self.lease_held = False
        self.lease_checks = 10**9
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
        attempts: int = 5,
    ) -> None:
        """Append one dead letter of a record `number` whose original topic is `topic`."""
        origin = Record(topic, 1, number, 5, f"k{number}".encode(), f"v{number}".encode(), lambda: list(headers))
        outcome = Reply(f"E{number % 2}", "no", permanent=True)
        self.dead(partition, origin, headers_of(DeadLetter(origin, group, attempts, outcome, 1.0, 2.0)))

    def dead(self, partition: int, origin: Record, headers: list[Header]) -> None:
        self.write(OutgoingRecord(DLQ, origin.key, origin.value, headers, partition), 9)

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        if records != [NOTHING_COMPLETED]:
            self.sends.append(len(records))
        return await self.producer.produce(records)

    def _refusal(self, record: OutgoingRecord) -> HeadraceError | None:
        if record == NOTHING_COMPLETED:
            return None
        self.calls += 1
        if self.calls in self.fail_at:
            return KafkaTimeout("no response")
        if record.value in self.refused:
            return RecordRefused("no key")
        if record.value in self.too_large:
            return RecordTooLarge("too large")
        if record.topic == COMPLETED_TOPIC:
            self.events.append("save")
        return None

    @property
    def produced(self) -> list[OutgoingRecord]:
        """What was written elsewhere than to the topic of completed dead letters."""
        return [record for record in self.producer.records if record.topic != COMPLETED_TOPIC]

    @property
    def marks(self) -> list[Record]:
        """What the topic of completed dead letters has."""
        return [record for record in self.records(COMPLETED_TOPIC) if record.key != NOTHING_COMPLETED.key]

    def is_marked(self, offset: int) -> bool:
        """Whether an offset of partition 0 is completed, as the topic says."""
        found = CompletedOffsets(self, DLQ)  # type: ignore[arg-type]
        found.begin(self.brokers.topics[DLQ].id)
        for mark in self.marks:
            found.take((mark.key or b"").decode().partition(":")[2], mark.value)
        return found.is_completed(0, offset)

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.produced]

    def ended(self) -> set[int]:
        """Return the offsets of partition 0 that a new process finds marked."""
        return asyncio.run(self.completed())

    async def completed(self) -> set[int]:
        found = CompletedOffsets(self, DLQ)  # type: ignore[arg-type]
        await found.load()
        return {o for o in range(len(self.records(DLQ))) if found.is_completed(0, o)}


class FakeLease:
    def __init__(self, fake: DeadLetterCluster) -> None:
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
    """Writes nothing more after a transaction that was not written."""

    def __init__(self, fake: DeadLetterCluster) -> None:
        self._fake = fake
        self._over = False

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        self._over = True

    def submit(self, records: Sequence[OutgoingRecord]) -> asyncio.Future[list[Any]]:
        if self._over:
            self._fake.producer.transaction_ends.insert(0, "abort")
        response = self._fake.producer.submit(records)
        response.add_done_callback(self._ended)
        return response

    def _ended(self, response: asyncio.Future[list[Any]]) -> None:
        self._over |= response.cancelled() or not isinstance(response.result()[0], Produced)


class RedeliveryHarness(DeadLetterCluster):
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
        self.brokers.create_topic(COMPLETED_TOPIC)
        completed = CompletedOffsets(self, DLQ)  # type: ignore[arg-type]
        completed.begin(self.brokers.topics[DLQ].id)
        for record in completed.records_for({0: offsets}):
            self.write(record)

    async def read_records(
        self, kafka: KafkaConfig, starts: Any, ends: Any = None, properties: Any = None
    ) -> AsyncGenerator[list[Record], None]:
        is_dead_letters = any(partition.topic == DLQ for partition in starts)
        self.reads += is_dead_letters
        if self.silent and is_dead_letters:
            await asyncio.Event().wait()
        await self.clock.advance(self.seconds_per_read * is_dead_letters)
        async for batch in super().read_records(kafka, starts, ends):
            self.records_read += is_dead_letters * len(batch)
            yield batch


def install(fake: DeadLetterCluster, patch: pytest.MonkeyPatch) -> None:
    fake.read_by(patch, compacted_table, redrive, replay, pages)
    patch.setattr(completed_offsets, "Lease", lambda *_, **__: FakeLease(fake))
    patch.setattr(redrive_writers, "TransactionSession", lambda *_, **__: FakeSession(fake))
