"""What a consumer costs at a rate: processor time, threads, memory, offset records. Pure arithmetic.

The figures of one more consumer are those of docs/sizing.md; those of your machine are in the rates file.
"""

import math
from typing import Final, NamedTuple

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.delivery.pump_context import COMMIT_RECORDS, CommitPace
from headrace_devkit.plan.rates import ConsumerRate, ProcessRates

THREADS_PER_CONSUMER: Final = 5.5
FILES: Final = 31
FILES_PER_CONSUMER: Final = 9
MEGABYTES_PER_CONSUMER: Final = 1
_FETCHES_PER_SECOND: Final = 200.0
"""Most responses with records that a member gets in a second: one each 5 ms, as it asks again after each."""


class ConsumerCost(NamedTuple):
    """What one consumer costs in all its processes together."""

    name: str
    copies: int
    deliveries: float
    """Per second."""
    cores: float
    key_load: float
    """How busy the most frequent key is: deliveries at a time that it needs, of the one it may have; 0 if unordered."""
    partition_load: float
    """The same for the largest partition."""
    partition_rate: float
    """Records per second of the largest partition."""


def cost_of(
    name: str, settings: ReactiveConsumerConfig, rate: ConsumerRate, costs: ProcessRates, copies: int
) -> ConsumerCost:
    """Return what a consumer costs at a rate."""
    records = rate.records_per_second
    per_partition = records / max(1, rate.partitions)
    share = rate.largest_partition or 1 / max(1, rate.partitions)
    largest = records * share
    # Records that arrive while a delivery of their partition is in flight are delivered together.
    batch = max(1.0, min(settings.batch.max_records, per_partition * rate.backend_seconds))
    deliveries = records / batch
    fetches = _fetches(settings, rate, records / copies) * copies
    fetch_microseconds = costs.fetch_microseconds + rate.partitions / copies * costs.partition_microseconds
    microseconds = (
        records * costs.record_microseconds + deliveries * costs.delivery_microseconds + fetches * fetch_microseconds
    )
    wait = rate.backend_seconds
    if settings.ordering == "partition":
        partition_load, key_load = largest / settings.batch.max_records * wait, 0.0
    else:
        one_by_one = records * rate.largest_key * wait
        partition_load, key_load = 0.0, one_by_one if settings.ordering == "key" else 0.0
    return ConsumerCost(name, copies, deliveries, microseconds / 1e6, key_load, partition_load, largest)


def _fetches(settings: ReactiveConsumerConfig, rate: ConsumerRate, records: float) -> float:
    """Return how often a second a member gets records: at once, or when there are `fetch.min.bytes` of them."""
    properties = settings.consumer.properties
    least = int(str(properties.get("fetch.min.bytes", 1))) / rate.record_bytes
    by_time = 1000 / max(1, int(str(properties.get("fetch.wait.max.ms", 500))))
    return min(records, _FETCHES_PER_SECOND, max(by_time, records / max(1.0, least)))


def copies_for(cores: float, costs: ProcessRates) -> int:
    """Return how many processes a consumer needs if it may take a quarter of what is planned of each."""
    return max(costs.copies, math.ceil(cores / (0.6 * costs.cores / 4)))


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
