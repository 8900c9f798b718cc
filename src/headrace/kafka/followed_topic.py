"""A compacted topic of ours with one partition that every process reads from its start and goes on reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError, KafkaUnavailable
from headrace.kafka.admin import Admin
from headrace.kafka.own_topics import ensure_table
from headrace.kafka.reader import read_records
from headrace.lifecycle import Clock, Readiness, Service
from headrace.records import Record, TopicPartition

_AGAIN_SECONDS = 1.0
_MISSING_SECONDS = 30.0
_CONFIGS = {"cleanup.policy": "compact"}


class FollowedTopic(Service):
    """Hands over what the topic holds and what comes; an interruption ends with the record it ended before."""

    def __init__(self, kafka: KafkaConfig, admin: Admin, name: str, source: str, clock: Clock) -> None:
        """Prepare.

        Args:
            kafka: Where.
            admin: For creating it, if it may be, and for its ends.
            name: The topic.
            source: The topic it takes replication factor and min ISR from; empty takes the broker's defaults.
            clock: For the pauses between tries.
        """
        super().__init__(f"topic {name}")
        self.on_records: Callable[[Sequence[Record], int], None] = lambda records, position: None
        """Is called with records, in order, and the offset up to which everything was handed over. Set before start."""
        self.missing = ""
        """Why there is no such topic and none can be made; empty while there may be one."""
        self._partition = TopicPartition(name, 0)
        self._source = source
        self._kafka = kafka
        self._admin = admin
        self._clock = clock
        self._position: int | None = None
        self._problem = f"{name} is not read yet"

    async def start(self) -> None:
        self.spawn(self._follow(), "follow")

    def readiness(self) -> Readiness:
        return Readiness(not self._problem, self._problem)

    async def end(self) -> int:
        """Return the offset behind the last record that is written now.

        Raises:
            KafkaError: Kafka does not say.
        """
        return (await self._admin.written_offsets([self._partition]))[self._partition]

    def loaded(self) -> None:
        """Take note that all is handed over that was there; again after each interruption."""

    def absent(self) -> None:
        """Take note that there is no such topic and none can be made; again with each try."""

    async def _follow(self) -> None:
        while True:
            try:
                if self._problem:
                    await self._load()
                self._problem = ""
                self.loaded()
                async for records in read_records(self._kafka, {self._partition: self._position or 0}):
                    self._take(records)
            except HeadraceError as error:
                self._problem = f"{self._partition.topic} is not read: {error.description}"
            await self._clock.sleep(_MISSING_SECONDS if self.missing else _AGAIN_SECONDS)

    async def _load(self) -> None:
        if self._position is None:
            await self._make()
            self._position = (await self._admin.start_offsets([self._partition]))[self._partition]
        end = await self.end()
        async for records in read_records(self._kafka, {self._partition: self._position}, {self._partition: end}):
            self._take(records)
        # Compaction may have removed the last ones, and then no record says that the end is reached.
        self._position = max(self._position, end)
        self.on_records((), self._position)

    async def _make(self) -> None:
        name = self._partition.topic
        if not await self._admin.has_topic(name):
            try:
                await ensure_table(self._kafka, self._admin, name, self._source, _CONFIGS)
            except KafkaUnavailable:
                raise
            except HeadraceError as error:
                self.missing = error.description
                self.absent()
                raise
        self.missing = ""

    def _take(self, records: Sequence[Record]) -> None:
        if records:
            self._position = records[-1].offset + 1
            self.on_records(records, self._position)
