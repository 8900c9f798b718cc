"""Which topics a producer knows, which are missing, and the partition that it chooses for a record."""

from collections import deque
from collections.abc import Callable

import confluent_kafka
from confluent_kafka import KafkaError

from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.offsets import Partition
from headrace_devkit.simulation.produce_queue import QueuedRecord

_PROPAGATION_SECONDS = 30.0
"""`topic.metadata.propagation.max.ms`: for this time a missing topic may be one that was just created."""
_STICKY_SECONDS = 0.01
"""`sticky.partitioning.linger.ms`."""


class ProducedTopics:
    """Which topics a producer knows, which are missing, and the partition that it chooses."""

    def __init__(self, cluster: ClientCluster) -> None:
        self._cluster = cluster
        self._first_seen: dict[str, float] = {}
        self._missing: dict[str, None] = {}
        self._looking: dict[str, None] = {}
        self.unplaced: dict[str, deque[QueuedRecord]] = {}
        """Records of topics that are not known yet."""
        self._sticky: dict[str, tuple[float, int]] = {}
        """Until when records without a key go to which partition."""

    def is_missing(self, topic: str) -> bool:
        """Whether the cluster certainly has no such topic."""
        return topic in self._missing and not self._cluster.count(topic)

    def drop(self, picks: Callable[[QueuedRecord], bool]) -> list[QueuedRecord]:
        """Remove records of topics that are not known yet, and return them."""
        found = [record for records in self.unplaced.values() for record in records if picks(record)]
        kept = {name: deque(r for r in records if not picks(r)) for name, records in self.unplaced.items()}
        self.unplaced = {name: records for name, records in kept.items() if records}
        return found

    def forget_leader(self, key: Partition) -> None:
        """Look for the leader of a partition before the next batch."""
        topic, partition = key
        if known := self._cluster.topics.get(topic):
            leaders = [None if index == partition else leader for index, leader in enumerate(known.leaders)]
            self._cluster.topics[topic] = known._replace(leaders=tuple(leaders))

    def look(self, topic: str, then: Callable[[], None], pause_seconds: float) -> None:
        """Ask the cluster for a topic, unless that is being done; `then` is called when to look again."""
        if topic in self._looking:
            return
        self._looking[topic] = None
        first_seen = self._first_seen.setdefault(topic, self._cluster.world.now)

        def answered(error: KafkaError | None) -> None:
            known = self._cluster.topics.get(topic)
            is_over = self._cluster.world.now - first_seen > _PROPAGATION_SECONDS
            if error is None and known is None and is_over:
                self._missing[topic] = None
            elif known is not None:
                self._missing.pop(topic, None)
            if known is not None and None not in known.leaders:
                again()
            else:
                self._cluster.after(pause_seconds, again)

        def again() -> None:
            self._looking.pop(topic, None)
            then()

        self._cluster.refresh([topic], answered)

    def choose(self, topic: str, key: bytes | None) -> int:
        """Return a record's partition, as the partitioner `murmur2_random` does, which Headrace's producers use."""
        count = self._cluster.count(topic)
        if key is not None:
            return int(confluent_kafka.murmur2(key, count))
        until, partition = self._sticky.get(topic, (0.0, 0))
        now = self._cluster.world.now
        if now >= until or partition >= count:
            partition = self._cluster.world.random.randrange(count)
            self._sticky[topic] = now + _STICKY_SECONDS, partition
        return partition
