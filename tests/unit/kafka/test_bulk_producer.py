"""Records of which only the number that failed is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka import BulkProducer
from headrace.lifecycle import run_blocking

NOWHERE = KafkaConfig(bootstrap_servers="127.0.0.1:1")


def written(records: Sequence[tuple[bytes, bytes]], settings: ProducerConfig) -> tuple[int, str, int]:
    """Write records to nowhere, stop, and return what failed, why, and what is said to wait before."""

    async def main() -> tuple[int, str, int]:
        producer = BulkProducer(NOWHERE, settings, "notes")
        early, _ = await run_blocking(producer.write, "t", records)
        waiting = producer.waiting
        await producer.stop()
        failed, why = early, ""
        while producer.waiting:
            late, why = await run_blocking(producer.write, "t", [])
            failed += late
        return failed, why, early + waiting

    return asyncio.run(main())


def test_what_is_not_acknowledged_when_the_process_ends_has_failed() -> None:
    """Each record is counted, and the reason is said; nobody waits for Kafka."""
    failed, why, known = written([(b"k", b"v"), (b"", b"v")] * 1500, ProducerConfig())
    assert failed == known == 3000
    assert why


def test_a_record_that_the_client_refuses_has_failed_beside_the_others() -> None:
    """One is larger than the client allows."""
    assert written([(b"k", b"v" * 5000), (b"k", b"v")], ProducerConfig(max_record_bytes=2000))[0] == 2
