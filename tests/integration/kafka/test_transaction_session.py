"""Sessions of transactions on a real broker: the later one shuts out the one before for good."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.errors import HeadraceError, RecordTooLarge, TransactionAborted
from headrace.kafka import Admin, TransactionSession, read_records
from headrace.records import OutgoingRecord, Produced, TopicPartition
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.secured import kafka_settings


def test_a_session_that_was_shut_out_writes_nothing_more(kafka: Cluster, topic: MakeTopic) -> None:
    """Not what it is given next, nor later by another client of its own; the later session is not disturbed."""
    name = topic()
    settings = kafka_settings(kafka.bootstrap_servers, request_timeout_seconds=60)

    async def write(session: TransactionSession, value: bytes) -> Any:
        (result,) = await asyncio.wait_for(session.submit([OutgoingRecord(name, None, value, None, 0)]), 100)
        return result

    async def work() -> list[bytes | None]:
        first, second, third = (TransactionSession(Admin(settings), f"{name}-session") for _ in range(3))
        for session in (first, second, third):
            await session.start()
        assert isinstance(await write(first, b"1"), Produced)
        assert isinstance(await write(second, b"2"), Produced)
        for value in (b"never", b"nor this"):
            assert isinstance(await write(first, value), HeadraceError)
        assert isinstance(await write(second, b"3"), Produced)
        assert isinstance(await write(second, bytes(2_000_000)), RecordTooLarge)
        assert isinstance(await write(second, b"after a failure"), TransactionAborted)
        assert isinstance(await write(third, b"4"), Produced)
        for session in (first, second, third):
            await session.stop()
        place = TopicPartition(name, 0)
        ends = await Admin(settings).end_offsets([place])
        return [record.value async for batch in read_records(settings, {place: 0}, ends) for record in batch]

    assert asyncio.run(work()) == [b"1", b"2", b"3", b"4"]
