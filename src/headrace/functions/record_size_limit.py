"""The limit of `fetchMax`: larger records do not reach the workers."""

from collections.abc import Sequence

from headrace.delivery.protocols import Delivery, Destination, Reply
from headrace.records import RecordBatch


class RecordSizeLimit:
    """Passes records up to a size to a destination; a larger one has failed for good, so the failure policy decides.

    Kafka's client gets such a record whole, because a broker always sends the first batch of a partition.
    """

    def __init__(self, destination: Destination, most_bytes: int) -> None:
        self._destination, self._most_bytes = destination, most_bytes

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records = RecordBatch.of(delivery.records)
        small = [index for index, size in enumerate(records.sizes) if size <= self._most_bytes]
        if len(small) == len(records):
            return await self._destination.deliver(delivery)
        text = f"key and value have %d bytes, more than fetchMax ({self._most_bytes})"
        replies = [Reply("RecordTooLarge", text % size, reached=False, permanent=True) for size in records.sizes]
        if small:
            others = await self._destination.deliver(delivery._replace(records=records.select(small)))
            for index, reply in zip(small, others, strict=True):
                replies[index] = reply
        return replies
