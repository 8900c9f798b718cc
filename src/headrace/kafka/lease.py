"""A lease: at most one process of all that share the cluster does a piece of work at a time.

Whoever is assigned the one partition of a lock topic, in a group of that name, holds it. So a process that is killed
loses it when its session in the group ends, and one that was stopped and wakes up finds out before it does more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable, LeaseLost
from headrace.kafka.admin import Admin
from headrace.kafka.consumer import Consumer
from headrace.kafka.topics import InternalTopic
from headrace.lifecycle import Clock, Deadline
from headrace.records import Committed, Record, TopicPartition

_GROUP: Final = "headrace.lease."
LOCK_TOPIC: Final = "_headrace-locks"
_AGAIN_SECONDS: Final = 0.3
_LOOK_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 60.0
_LEAVE_SECONDS: Final = 5.0
_FRESH_SECONDS: Final = 3.0
"""After so long without a look another one is due; sessions are three times as long."""


async def lease_holder(admin: Admin, name: str) -> str:
    """Return who holds a lease, as host, process and since when; empty if nobody does."""
    members = await admin.group_members(_GROUP + name)
    return members[0].client.removeprefix("headrace-lease-") if members else ""


class Lease:
    """Held by one process at a time; a `Listener` of its own membership."""

    def __init__(self, kafka: KafkaConfig, admin: Admin, name: str, clock: Clock, *, source: str = "") -> None:
        """Prepare; `name` is what is leased (`redrive.orders.dlq`), `source` a topic the lock topic is made like."""
        self.lost = asyncio.Event()
        """Set when somebody else may hold it."""
        self.holder = ""
        """Who held it when it could not be had: host, process and since when."""
        self._kafka = kafka
        self._admin = admin
        self._name = name
        self._group = _GROUP + name
        self._clock = clock
        self._source = source
        self._held = asyncio.Event()
        self._consumer: Consumer | None = None
        self._me = ""
        self._seen = 0.0

    async def acquire(self, limit_seconds: float = 0.0) -> bool:
        """Return whether it is ours now; waits so long for somebody who has it.

        Raises:
            TopicNotFound: There is no lock topic, and it may not be made.
            KafkaUnavailable: Nobody has it, and Kafka does not give it either.
        """
        await InternalTopic(LOCK_TOPIC, self._source, {}).ensure(self._admin)
        deadline = Deadline(self._clock, limit_seconds)
        while True:
            if holder := await lease_holder(self._admin, self._name):
                self.holder = holder
            elif await self._join():
                return True
            if deadline.passed:
                return False
            await self._clock.sleep(min(_AGAIN_SECONDS, deadline.remaining_seconds))

    async def check(self) -> None:
        """Return if it is held still; asks Kafka if the last look is long ago, as when this process was stopped.

        Raises:
            LeaseLost: It is not.
            KafkaUnavailable: Kafka does not say.
        """
        now = self._clock.monotonic()
        if now - self._seen > _FRESH_SECONDS and not self.lost.is_set():
            if any(m.client.startswith(self._me) for m in await self._admin.group_members(self._group)):
                self._seen = now
            else:
                self.lost.set()
        if self.lost.is_set():
            raise LeaseLost(
                f"{self._group}: another process may have taken over, because this one was not heard of for a while; "
                "it stops here. What it has done is kept: start it again to go on"
            )

    async def release(self) -> None:
        """Let go of it, so that the next one need not wait."""
        consumer, self._consumer = self._consumer, None
        if consumer:
            await consumer.drain(Deadline(self._clock, _LEAVE_SECONDS))
            await consumer.stop()

    def on_assigned(
        self, partitions: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, Committed]
    ) -> None:
        if partitions:
            self._held.set()

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        """Nobody writes there."""

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        """That tells nothing."""

    def on_gap(self, partition: TopicPartition, offsets: int) -> None:
        """There is none."""

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, Committed]:
        self.lost.set()
        return {}

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.lost.set()

    async def _join(self) -> bool:
        """Take part in the group, and stay if that gives us the lease."""
        since = datetime.fromtimestamp(self._clock.time(), UTC).strftime("%Y-%m-%dT%H.%M.%SZ")
        name = f"lease-a-process-since-{since}-{secrets.token_hex(2)}"  # which one, every member says
        self._me = f"headrace-{name}"
        self.lost.clear()
        self._held.clear()
        self._consumer = Consumer(
            self._kafka,
            name=name,
            group=self._group,
            topics=[LOCK_TOPIC],
            listener=self,
            flow=FlowControl(),
            clock=self._clock,
        )
        self._consumer.on_death = lambda _: self.lost.set()
        try:
            await self._consumer.start()
            won = await self._wait_assigned(self._consumer)
        except BaseException:
            await self.release()
            raise
        if not won:
            await self.release()
        return won

    async def _wait_assigned(self, consumer: Consumer) -> bool:
        deadline = Deadline(self._clock, _JOIN_SECONDS)
        while not deadline.passed:
            self._seen = self._clock.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._held.wait(), _LOOK_SECONDS)
                return not self.lost.is_set()
            members = await self._admin.group_members(self._group)
            if others := [m for m in members if m.partitions and not m.client.startswith(self._me)]:
                self.holder = others[0].client.removeprefix("headrace-lease-")  # two came at a time
                return False
        raise KafkaUnavailable(f"{self._group}: not given within {_JOIN_SECONDS:g} s: {consumer.readiness().reason}")
