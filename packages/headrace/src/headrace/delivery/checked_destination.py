"""Which records of a delivery reach their destination: those to which no check objects."""

from collections.abc import Callable, Mapping, Sequence

from headrace.delivery.outcomes import Delivery, Destination, Reply
from headrace.records import RecordBatch
from headrace.runtime import Clock

Check = Callable[[Delivery, RecordBatch], Mapping[int, Reply]]
"""Returns the replies for the records that are not delivered, by index."""


class CheckedDestination:
    """Delivers the records that pass each check; the reply of the first check that objects counts."""

    def __init__(self, destination: Destination, checks: Sequence[Check]) -> None:
        self._destination = destination
        self._checks = checks

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records, replies = RecordBatch.of(delivery.records), dict[int, Reply]()
        for check in self._checks:
            replies = {**check(delivery, records), **replies}
        if not replies:
            return await self._destination.deliver(delivery)
        if passed := [index for index in range(len(records)) if index not in replies]:
            sent = await self._destination.deliver(delivery._replace(records=records.select(passed)))
            replies.update(zip(passed, sent, strict=True))
        return [replies[index] for index in range(len(records))]


def younger_than(seconds: float, clock: Clock) -> Check:
    """Return the check of `max_age`; a record without a timestamp passes, and so does each one of a replay."""

    def check(delivery: Delivery, records: RecordBatch) -> Mapping[int, Reply]:
        now_ms = clock.time() * 1000
        least_ms = -1 if delivery.replay else now_ms - seconds * 1000
        return {
            index: _failed("RecordExpired", f"the record is {(now_ms - at) / 1000:.0f} s old; most are {seconds:g} s")
            for index, at in enumerate(records.timestamps_ms)
            if 0 <= at < least_ms
        }

    return check


def not_larger_than(most_bytes: int) -> Check:
    """Return the check of `fetchMax`: Kafka's client cannot skip a large record at the start of a fetch."""

    def check(_: Delivery, records: RecordBatch) -> Mapping[int, Reply]:
        text = f"key and value have %d bytes, more than fetchMax ({most_bytes})"
        sizes = enumerate(records.sizes)
        return {index: _failed("RecordTooLarge", text % size) for index, size in sizes if size > most_bytes}

    return check


def _failed(error: str, reason: str) -> Reply:
    return Reply(error, reason, reached=False, permanent=True)
