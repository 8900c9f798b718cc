"""Topics of ours (dead letter topics, output topics, tables): created at start, like the topic they serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError, TopicNotFound
from headrace.kafka.admin import Admin
from headrace.lifecycle import Clock, Readiness, Service

_RETRY_SECONDS = 1.0


async def ensure_table(
    kafka: KafkaConfig, admin: Admin, name: str, source: str, configs: Mapping[str, str] | None = None
) -> None:
    """Create a topic of one partition, like the topic it serves, unless it is there.

    Raises:
        TopicNotFound: It is not, and topics are not created here (`kafka.create_topics`).
        KafkaError: Kafka refuses.
    """
    if not await admin.has_topic(name):
        if not kafka.create_topics:
            raise TopicNotFound(f"topic {name} does not exist, and kafka.create_topics is false: create it")
        await admin.ensure_topic_like(name, source, 1, configs)


class OwnTopics(Service):
    """Keeps trying until every topic of ours exists; readiness says which does not, and why."""

    def __init__(
        self,
        admin: Admin,
        wanted: Mapping[str, str],
        clock: Clock,
        name: str = "topics",
        fits: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            admin: The door to the cluster.
            wanted: Topic to create: topic it takes partitions, replication factor and min ISR from.
            clock: For the pauses between tries.
            name: Name of the service.
            fits: Topic to create: all topics whose records it must be able to take.
        """
        super().__init__(name)
        self._admin = admin
        self._missing, self._fits = dict(wanted), fits or {}
        self._clock = clock
        self._problem = "topics are being created"

    async def start(self) -> None:
        self.spawn(self._create(), "create")

    def readiness(self) -> Readiness:
        return Readiness(False, self._problem) if self._missing else Readiness(True)

    async def _create(self) -> None:
        while self._missing:
            for name, source in list(self._missing.items()):
                try:
                    await self._admin.ensure_topic_like(name, source, fits=self._fits.get(name, ()))
                except HeadraceError as error:
                    self._problem = f"topic {name} is not created yet: {error.description}"
                else:
                    del self._missing[name]
            if self._missing:
                await self._clock.sleep(_RETRY_SECONDS)
