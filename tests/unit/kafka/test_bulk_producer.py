"""Records of which only the number that failed is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka import BulkProducer
from headrace.lifecycle import run_blocking

NOWHERE = KafkaConfig(bootstrap_servers="127.0.0.1:1")


def written(records: Sequence[tuple[bytes, bytes]], settings: ProducerConfig) -> tuple[int, str]:
    """Write records to nowhere and let the producer stop once it has them all."""

    async def main() -> tuple[int, str]:
        loop, given = asyncio.get_running_loop(), asyncio.Event()
        producer = BulkProducer(NOWHERE, settings, "notes")

        def give() -> Iterator[tuple[bytes, bytes]]:
            yield from records
            loop.call_soon_threadsafe(given.set)

        write = asyncio.ensure_future(run_blocking(producer.write, "t", give()))
        await given.wait()
        await producer.stop()
        return await write

    return asyncio.run(main())


def test_what_is_not_acknowledged_when_the_process_ends_has_failed() -> None:
    """Each record is counted, and the reason is said; whoever waits for the write goes on."""
    failed, why = written([(b"k", b"v"), (b"", b"v")] * 1500, ProducerConfig())
    assert failed == 3000
    assert why


def test_a_record_that_the_client_refuses_has_failed_beside_the_others() -> None:
    """One is larger than the client allows."""
    assert written([(b"k", b"v" * 5000), (b"k", b"v")], ProducerConfig(max_record_bytes=2000))[0] == 2
