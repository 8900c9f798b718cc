"""The limit of `fetchMax`: larger records do not reach the workers."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.delivery.protocols import Delivery, Destination, Reply


class RecordSizeLimit:
    """Passes records up to a size to a destination; a larger one has failed for good, so the failure policy decides.

    Kafka's client gets such a record whole, because a broker always sends the first batch of a partition.
    """

    def __init__(self, destination: Destination, most_bytes: int) -> None:
        """Limit the bytes of key and value."""
        self._destination, self._most_bytes = destination, most_bytes

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records = delivery.records
        large = {index for index, record in enumerate(records) if record.size_bytes > self._most_bytes}
        if not large:
            return await self._destination.deliver(delivery)
        others = [record for index, record in enumerate(records) if index not in large]
        replies = iter(await self._destination.deliver(delivery._replace(records=others)) if others else ())
        return [
            self._too_large(records[index].size_bytes) if index in large else next(replies)
            for index in range(len(records))
        ]

    def _too_large(self, size_bytes: int) -> Reply:
        reason = f"key and value have {size_bytes} bytes, more than fetchMax ({self._most_bytes})"
        return Reply("RecordTooLarge", reason, reached=False, permanent=True)
