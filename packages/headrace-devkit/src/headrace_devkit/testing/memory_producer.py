"""A producer, and transactions, that write to a cluster in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import (
    CommitRefused,
    HeadraceError,
    KafkaTimeout,
    RecordTooLarge,
    TopicNotFound,
    TransactionAborted,
)
from headrace.records import OutgoingRecord

if TYPE_CHECKING:
    from headrace_devkit.testing.memory_cluster import MemoryCluster

_MOST_BYTES = 1_048_588
"""Kafka's default of `max.message.bytes`."""


class MemoryProducer:
    """Stands for a `Producer` and for `TransactionalProducers`. Results come in the next turn of the loop."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        # What a test sees
        self.records: list[OutgoingRecord] = []
        """What was taken and not refused, or was committed in a transaction, in its order."""
        self.taken = asyncio.Event()
        # What a test decides
        self.failure: Exception | None = None
        """Raised by every request while it is set."""
        self.refusal: Callable[[OutgoingRecord], HeadraceError | None] = lambda record: None
        """Says why a record is not written."""
        self.transaction_ends: list[str] = []
        """How the next transactions end: "commit", "abort", or "doubt" if it is committed and the response is lost."""
        self._held: list[Callable[[], None]] | None = None
        """What waits for `release`; None if nothing has to wait."""

    def refuse(self, *outcomes: HeadraceError | None) -> None:
        """Refuse the next records with these errors; None writes one."""
        waiting = list(outcomes)
        self.refusal = lambda record: waiting.pop(0) if waiting else None

    def hold(self) -> None:
        """Take records, and write none before `release`."""
        self._held = []

    def release(self) -> None:
        """Write what was held."""
        held, self._held = self._held or [], None
        for write in held:
            write()

    async def produce(self, records: Sequence[OutgoingRecord], sliced: bool = False, **_: Any) -> list[Any]:
        return await self._produced(records)

    def send(self, records: Sequence[OutgoingRecord], done: Callable[[list[Any]], None], *_: Any, **__: Any) -> None:
        self._produced(records).add_done_callback(lambda response: done(response.result()))

    def check_capacity(self, topic: str, size_bytes: int) -> None:
        if self.failure:
            raise self.failure

    def submit(
        self, records: Sequence[OutgoingRecord], last_record: Any = None, group: Any = None
    ) -> asyncio.Future[list[Any]]:
        """Write records in one transaction: all of them or none."""
        refusals = self._take(records)
        return self._later(lambda: self._transact(records, last_record, group, refusals))

    def _produced(self, records: Sequence[OutgoingRecord]) -> asyncio.Future[list[Any]]:
        outcomes = [*zip(self._take(records), records, strict=True)]
        self.records += [record for why, record in outcomes if not why]
        return self._later(lambda: [why or self._cluster.write(record) for why, record in outcomes])

    def _take(self, records: Sequence[OutgoingRecord]) -> list[HeadraceError | None]:
        """Return why each record is refused."""
        if failure := self.failure or self._cluster.failure:
            raise failure
        self.taken.set()
        return [self.refusal(record) or self._impossible(record) for record in records]

    def _impossible(self, record: OutgoingRecord) -> HeadraceError | None:
        if record.topic not in self._cluster.brokers.topics:
            return TopicNotFound(f"topic {record.topic} does not exist", topic=record.topic)
        return RecordTooLarge("too large") if record.size_bytes > _MOST_BYTES else None

    def _later(self, write: Callable[[], list[Any]]) -> asyncio.Future[list[Any]]:
        loop = asyncio.get_running_loop()
        response: asyncio.Future[list[Any]] = loop.create_future()

        def run() -> None:
            results = write()  # also if the caller was cancelled
            if not response.done():
                response.set_result(results)

        if self._held is None:
            loop.call_soon(run)
        else:
            self._held.append(run)
        return response

    def _transact(
        self, records: Sequence[OutgoingRecord], last_record: Any, group: Any, refusals: Sequence[HeadraceError | None]
    ) -> list[Any]:
        ends = self.transaction_ends.pop(0) if self.transaction_ends else "commit"
        if group and not group.member():
            refusals = [CommitRefused()] * len(records)
        if any(refusals) or ends == "abort":
            return [why or TransactionAborted() for why in refusals]
        results: list[Any] = [self._cluster.write(record) for record in records]
        self.records += records
        if last_record:
            self.records.append(last_record(results))
            self._cluster.write(self.records[-1])
        if group:
            self._cluster.commit(group.group, group.offsets)
        return [KafkaTimeout("in doubt")] * len(records) if ends == "doubt" else results
