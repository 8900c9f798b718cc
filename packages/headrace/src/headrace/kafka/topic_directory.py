"""Topics of the cluster: how many partitions each has; creates those that only Headrace writes."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from cachetools import TTLCache

from headrace.errors import HeadraceError, KafkaUnavailable, TopicNotFound
from headrace.kafka.admin import Admin
from headrace.kafka.names import check_topic
from headrace.runtime import Clock, Readiness, Service

log = logging.getLogger(__name__)

_FRESH_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_CREATE_AGAIN_SECONDS = 1.0
_NEGATIVE_SECONDS = 0.5
_FIRST_LIMIT_SECONDS = 1.0
_LIMIT_SECONDS = 3.0
_FIRST_RESPONSE_SECONDS = 0.5
_NEGATIVE_ENTRIES = 10_000


class TopicDirectory(Service):
    """The number of partitions of each topic, without a request to a broker each time."""

    def __init__(self, admin: Admin, clock: Clock, name: str = "topics") -> None:
        super().__init__(name)
        self.admin = admin
        self._clock = clock
        self._partitions: dict[str, int] = {}
        self._missing: TTLCache[str, bool] = TTLCache(_NEGATIVE_ENTRIES, _NEGATIVE_SECONDS, clock.monotonic)
        self._problem: HeadraceError | None = KafkaUnavailable("Kafka has not answered yet")
        self._requested = asyncio.Event()
        self._missing_brokers: set[int] = set()

    async def start(self) -> None:
        await super().start()
        label = self.admin.reachability.label
        self.publish("headrace_kafka_missing_brokers", lambda: len(self._missing_brokers), bootstrap_servers=label)

    def readiness(self) -> Readiness:
        return Readiness(False, self._problem.description) if self._problem else Readiness(True)

    def known(self, topic: str) -> int | None:
        """Return the number of partitions of a topic if it is known; `partitions_of` looks others up."""
        return self._partitions.get(topic)

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions of a topic.

        An unknown topic is looked up at most twice a second. So a missing topic is refused at once, and a new one is
        found.

        Raises:
            InvalidRequest: The name is not a valid topic name.
            TopicNotFound: The cluster does not have it.
            KafkaUnavailable: The topic is not known, and no broker answers.
        """
        known = self._partitions.get(topic)
        if known is not None:
            return known
        check_topic(topic)
        if topic in self._missing:
            raise TopicNotFound(f"topic {topic} does not exist: create it or check its spelling", topic=topic)
        if not self._requested.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_RESPONSE_SECONDS):
                    await self._requested.wait()
        if self.admin.reachability.outage:
            raise self.admin.reachability.error(f"look up topic {topic}")
        if self._problem:
            # It is raised many times, and would collect the frames of every caller.
            raise self._problem.with_traceback(None)
        try:
            info = await self.admin.describe_topic(topic, "Write")
        except TopicNotFound:
            self._missing[topic] = True
            raise
        self._partitions[topic] = len(info.partitions)
        return len(info.partitions)

    async def run(self) -> None:
        while True:
            try:
                limit = _LIMIT_SECONDS if self._requested.is_set() else _FIRST_LIMIT_SECONDS
                topics = await self.admin.list_topics(limit)
            except HeadraceError as problem:
                self._problem = problem
            else:
                self._problem = None
                self._partitions = {topic.name: len(topic.partitions) for topic in topics}
                self._compare_brokers(set(self.admin.missing_brokers))
            self._requested.set()
            await self._clock.sleep(_RETRY_SECONDS if self._problem else _FRESH_SECONDS)

    def _compare_brokers(self, missing: set[int]) -> None:
        """Log which brokers have left the cluster since the last call, and which are back."""
        for broker in sorted(missing - self._missing_brokers):
            log.warning("Kafka at %s: broker %d is missing; its replicas fall behind", self.admin.servers, broker)
        for broker in sorted(self._missing_brokers - missing):
            log.warning("Kafka at %s: broker %d is back", self.admin.servers, broker)
        self._missing_brokers = missing


class InternalTopic(NamedTuple):
    """A topic that only Headrace writes, and how it is created."""

    name: str
    source: str = ""
    """The topic it takes replication factor, min ISR and partitions from; empty takes the broker's defaults."""
    configs: Mapping[str, str] = {}
    """Topic configuration by Kafka's names."""
    fits: Collection[str] = ()
    """All topics whose records it must be able to take."""

    async def ensure(self, admin: Admin) -> None:
        """Create the topic, compacted and with one partition, unless it exists.

        Raises:
            TopicNotFound: It does not exist, and topics are not created here (`kafka.create_topics`).
            KafkaError: Kafka refuses.
        """
        if not await admin.has_topic(self.name):
            if not admin.config.create_topics:
                raise TopicNotFound(f"topic {self.name} does not exist, and kafka.create_topics is false: create it")
            await admin.ensure_topic_like(self.name, self.source, 1, {"cleanup.policy": "compact", **self.configs})


class TopicCreator(Service):
    """Creates internal topics, and retries until all exist; readiness names a missing one and the reason."""

    def __init__(self, admin: Admin, topics: Iterable[InternalTopic], clock: Clock, name: str = "topics") -> None:
        super().__init__(name)
        self._admin = admin
        self._missing = list(topics)
        self._clock = clock
        self._problem = "topics are being created"

    def readiness(self) -> Readiness:
        return Readiness(False, self._problem) if self._missing else Readiness(True)

    async def run(self) -> None:
        while self._missing:
            for topic in list(self._missing):
                try:
                    await self._admin.ensure_topic_like(topic.name, topic.source, fits=topic.fits)
                except HeadraceError as error:
                    self._problem = f"creating topic {topic.name} failed, will retry: {error.description}"
                else:
                    self._missing.remove(topic)
            if self._missing:
                await self._clock.sleep(_CREATE_AGAIN_SECONDS)
