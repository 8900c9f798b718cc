"""What clients read of instances: counted, audited, and shown to operators."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from headrace.errors import HeadraceError
from headrace.kafka import Admin
from headrace.records import Record, RecordBatch, TopicPartition
from headrace.runtime import Clock, Service, next_slice
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.audit_events import Consumption
from headrace.sidecar.active.instance import ActiveInstance

_LAG_SECONDS: Final = 10.0
_MOST_LAGS: Final = 1000
_MOST_ENDS: Final = 10_000
"""Most partitions whose ends are requested."""


class InstanceStatus(msgspec.Struct, rename="camel"):
    """An instance, as operators see it."""

    group: str
    name: str
    principal: str
    """Who created it; empty without authentication."""
    topics: list[str]
    lag: int | None
    """Sum of the known lags."""
    lags: dict[str, int | None]
    """Assigned partitions: offsets from the next one to deliver to the end; null if unknown."""
    idle_seconds: float
    """Since its client last used it."""
    buffered_bytes: int
    """Fetched, but not delivered."""
    last_read: float | None
    """When records were last delivered, in seconds since the epoch."""
    is_reading: bool
    """Whether a read or a stream is in progress."""
    key_format: str
    value_format: str
    auto_commit: bool


class ReadMonitor(Service):
    """Counts and audits reads, and periodically fetches the end offsets of all partitions that are read."""

    def __init__(
        self, instances: Callable[[], Sequence[ActiveInstance]], admin: Admin, audit: Audit | None, clock: Clock
    ) -> None:
        super().__init__("lag of active consumers")
        self._instances = instances
        self._admin = admin
        self._audit = audit
        self._clock = clock
        self._delivered_records = 0
        self._last_reads: weakref.WeakKeyDictionary[ActiveInstance, float] = weakref.WeakKeyDictionary()
        self._ends: dict[TopicPartition, int] = {}

    async def start(self) -> None:
        self.publish("headrace_active_delivered_records_total", lambda: self._delivered_records)
        self.keep(self._follow_ends, "ends")

    def delivered(self, instance: ActiveInstance, batches: Sequence[RecordBatch]) -> None:
        """Count and audit records that a client has received, at least one."""
        self._delivered_records += sum(map(len, batches))
        self._last_reads[instance] = self._clock.time()
        if self._audit and self._audit.takes_delivered:
            who = Consumption("ACTIVE_CONSUMER", instance.spec.group, caller=instance.spec.owner, action="read")
            records: Sequence[Record] = batches[0] if len(batches) == 1 else [*itertools.chain(*batches)]
            self._audit.consumed(who, records, sum([batch.size_bytes for batch in batches]), "delivered", ())

    def lags(self) -> Iterator[tuple[str, TopicPartition, int]]:
        """Yield group, partition and lag of at most 1,000 partitions with a known lag."""
        lags = ((one.spec.group, p, lag) for one in self._instances() for p, lag in self._lags_of(one).items())
        looked_at = itertools.islice(lags, _MOST_ENDS)
        known = ((group, partition, lag) for group, partition, lag in looked_at if lag is not None)
        return itertools.islice(known, _MOST_LAGS)

    async def statuses(self) -> list[InstanceStatus]:
        """Return the status of every instance, sorted by group and name."""
        await self._find_ends()
        found = []
        for one in self._instances():
            found.append(self._status(one))
            await next_slice()
        return sorted(found, key=lambda one: (one.group, one.name))

    def _status(self, instance: ActiveInstance) -> InstanceStatus:
        spec = instance.spec
        lags = self._lags_of(instance)
        known = [lag for lag in lags.values() if lag is not None]
        return InstanceStatus(
            group=spec.group,
            name=spec.name,
            principal=spec.owner,
            topics=instance.membership.topics or sorted({partition.topic for partition in lags}),
            lag=sum(known) if known else None,
            lags={str(partition): lag for partition, lag in lags.items()},
            idle_seconds=round(self._clock.monotonic() - instance.last_used, 3),
            buffered_bytes=instance.buffered_bytes,
            last_read=self._last_reads.get(instance),
            is_reading=instance.turn.is_taken,
            key_format=spec.key_format,
            value_format=spec.value_format,
            auto_commit=spec.auto_commit_seconds is not None,
        )

    def _lags_of(self, instance: ActiveInstance) -> dict[TopicPartition, int | None]:
        ends = {} if self._admin.reachability.outage else self._ends
        following = instance.next_offsets
        return {
            partition: max(0, ends[partition] - following[partition])
            if partition in ends and partition in following
            else None
            for partition in instance.assigned
        }

    async def _find_ends(self) -> None:
        partitions: set[TopicPartition] = set()
        for one in self._instances():
            partitions.update(itertools.islice(one.assigned, _MOST_ENDS - len(partitions)))
            await next_slice()
        try:
            self._ends = await self._admin.known_ends(partitions)
        except HeadraceError:  # then a lag is unknown, not the last value
            self._ends = {}

    async def _follow_ends(self) -> None:
        while True:
            await self._clock.sleep(_LAG_SECONDS)
            await self._find_ends()
