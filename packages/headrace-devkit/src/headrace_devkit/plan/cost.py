"""What a consumer costs at a rate: processor time, threads, memory, offset records. Pure arithmetic.

The figures of one more consumer are those of docs/sizing.md, under load; those of your machine are in the rates file.
"""

import math
from typing import Final, NamedTuple

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.delivery.pump_context import COMMIT_RECORDS, CommitPace
from headrace_devkit.plan.rates import ConsumerRate, ProcessRates

PLANNED: Final = 0.6
"""How much of a process is planned to be used."""
THREADS_PER_CONSUMER: Final = 5.5
FILES: Final = 44
"""Of a process that has a consumer, with one broker."""
FILES_PER_CONSUMER: Final = 8
MEGABYTES_PER_CONSUMER: Final = 5
"""Under load; at rest it is 1."""
MEGABYTES_PER_PARTITION: Final = 0.035
_RESPONSE_SECONDS: Final = 0.0004
"""From a record in Kafka to the next request of a member, which asks again after each response."""
_PARTITION_SECONDS: Final = 3e-6
"""The same, for each partition in the request."""


class PlannedWork(NamedTuple):
    """What takes processor time, per second."""

    records: float
    deliveries: float
    responses: float
    """Those of Kafka with records."""
    partitions: float
    """Those that requests to Kafka name, all requests together."""


class ConsumerCost(NamedTuple):
    """What one consumer costs in all its processes together."""

    name: str
    copies: int
    deliveries: float
    """Per second."""
    busy: float
    """Cores for the work itself."""
    wakes: float
    """Cores for waking up, if the process were idle before each response."""
    key_load: float
    """How busy the most frequent key is: deliveries at a time that it needs, of the one it may have; 0 if unordered."""
    partition_load: float
    """The same for the largest partition."""
    partition_rate: float
    """Records per second of the largest partition."""

    @property
    def cores(self) -> float:
        """What it takes in processes that are used as planned."""
        return self.busy + (1 - PLANNED) ** 2 * self.wakes


def cores_of(busy: float, wakes: float) -> float:
    """Return what a process takes.

    With a part c of a processor in use, c of the responses come while it works and wake nothing. The others find c of
    its code and data still in the caches. So c = busy + (1 - c)^2 * wakes.
    """
    if busy >= 1 or not wakes:
        return busy
    return 1 - (math.sqrt(1 + 4 * wakes * (1 - busy)) - 1) / (2 * wakes)


def cost_of(
    name: str, settings: ReactiveConsumerConfig, rate: ConsumerRate, costs: ProcessRates, copies: int
) -> ConsumerCost:
    """Return what a consumer costs at a rate."""
    records = rate.records_per_second
    largest = records * (rate.largest_partition or 1 / max(1, rate.partitions))
    counts = counts_of(settings, rate, copies)
    busy = (
        counts.records * costs.record_microseconds
        + counts.deliveries * costs.delivery_microseconds
        + counts.partitions * costs.partition_microseconds
    )
    wakes = counts.responses * costs.fetch_microseconds + counts.deliveries * costs.reply_microseconds
    wait = rate.backend_seconds
    if settings.ordering == "partition":
        partition_load, key_load = largest / settings.batch.max_records * wait, 0.0
    else:
        one_by_one = records * rate.largest_key * wait
        partition_load, key_load = 0.0, one_by_one if settings.ordering == "key" else 0.0
    return ConsumerCost(name, copies, counts.deliveries, busy / 1e6, wakes / 1e6, key_load, partition_load, largest)


def counts_of(settings: ReactiveConsumerConfig, rate: ConsumerRate, copies: int) -> PlannedWork:
    """Return what the members of a consumer do in a second, all together."""
    properties = settings.consumer.properties
    member, partitions = rate.records_per_second / copies, rate.partitions / copies
    wait = int(str(properties.get("fetch.wait.max.ms", 500))) / 1000
    least = int(str(properties.get("fetch.min.bytes", 1))) / rate.record_bytes
    has_records = 1 - math.exp(-member * wait)
    if not has_records:
        return PlannedWork(0, 0, 0, rate.partitions / wait)
    # Kafka responds at the first record, or when there are enough of them.
    first = has_records / member
    interval = max(first, min(wait, least / member)) + _RESPONSE_SECONDS + partitions * _PARTITION_SECONDS
    # Records that come in one response, or while a delivery of their partition is in flight, are delivered together.
    each = member / partitions
    by_response = (1 - math.exp(-each * interval)) / interval
    by_backend = 1 / (rate.backend_seconds + math.exp(-each * rate.backend_seconds) / each)
    deliveries = max(min(by_response, by_backend), each / settings.batch.max_records) * rate.partitions
    return PlannedWork(rate.records_per_second, deliveries, has_records * copies / interval, rate.partitions / interval)


def copies_for(cores: float, costs: ProcessRates) -> int:
    """Return how many processes a consumer needs if it may take a quarter of what is planned of each."""
    return max(costs.copies, math.ceil(cores / (PLANNED * costs.cores / 4)))


def offset_share(records_per_second: float, partitions: int, in_process: int, pace: CommitPace | None = None) -> float:
    """Return the offset records per record, if a process has `in_process` partitions.

    With random arrival a partition of rate r that is committed every T seconds has (1 - e^-rT) / rT offset records.
    """
    rate = records_per_second / max(1, partitions)
    if not rate:
        return 0.0
    pace = pace or CommitPace(partitions=lambda: in_process)
    seconds = max(pace.seconds, min(pace.most_seconds, COMMIT_RECORDS / rate))
    return (1 - math.exp(-rate * seconds)) / (rate * seconds)
