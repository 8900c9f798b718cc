"""A lease: of all processes that share a cluster, at most one at a time does a piece of work.

The member of a group of the lease's name that is assigned the one partition of the lock topic holds the lease. So a
killed process loses it when its session in the group ends. A process that was suspended checks before it continues.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Final

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable, LeaseLost
from headrace.kafka.admin import Admin
from headrace.kafka.consumer import Consumer
from headrace.kafka.loop_proxy import Listener
from headrace.kafka.positions import ReadPolicy
from headrace.kafka.topic_directory import InternalTopic
from headrace.records import CommitOffsets, Epochs, TopicPartition
from headrace.runtime import Clock, Deadline, chance

_GROUP: Final = "headrace.lease."
LOCK_TOPIC: Final = "_headrace-locks"
_RETRY_SECONDS: Final = 0.3
_CHECK_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 60.0
_LEAVE_SECONDS: Final = 5.0
_FRESH_SECONDS: Final = 3.0
"""An older check is repeated; sessions are three times as long."""


async def lease_holder(admin: Admin, name: str) -> str:
    """Return the holder of a lease as host, process and start time; empty if there is none."""
    return (await lease_holders(admin, [name]))[name]


async def lease_holders(admin: Admin, names: Collection[str]) -> dict[str, str]:
    """Return the holder of each of these leases."""
    members = await admin.members_of([_GROUP + name for name in names], "Read")
    found = {name: members[_GROUP + name] for name in names}
    return {name: each[0].client.removeprefix("headrace-lease-") if each else "" for name, each in found.items()}


class Lease(Listener):
    """A lease of one process; a `Listener` of its own group membership."""

    def __init__(self, kafka: KafkaConfig, admin: Admin, name: str, clock: Clock, *, source: str = "") -> None:
        """Prepare; `name` is the work (`redrive.orders.dlq`), `source` the topic whose settings the lock topic gets."""
        self.lost = asyncio.Event()
        """Set when another process may hold it."""
        self.holder = ""
        """The process that held it when it was not acquired: host, process and start time."""
        self._kafka = kafka
        self._admin = admin
        self._name = name
        self._group = _GROUP + name
        self._clock = clock
        self._source = source
        self._assigned = asyncio.Event()
        self._consumer: Consumer | None = None
        self._member = ""
        self._checked_at = 0.0

    async def acquire(self, limit_seconds: float = 0.0) -> bool:
        """Return whether this process holds it now; waits for another holder within the limit.

        Raises:
            TopicNotFound: There is no lock topic, and it must not be created.
            KafkaUnavailable: No process holds it, and Kafka does not assign it.
        """
        await InternalTopic(LOCK_TOPIC, self._source).ensure(self._admin)
        deadline = Deadline(self._clock, limit_seconds)
        while True:
            if holder := await lease_holder(self._admin, self._name):
                self.holder = holder
            elif await self._join():
                return True
            if deadline.passed:
                return False
            await self._clock.sleep(min(_RETRY_SECONDS, deadline.remaining_seconds))

    async def check(self) -> None:
        """Return if it is still held; asks Kafka if the last check is old, for example after a suspension.

        Raises:
            LeaseLost: It is not.
            KafkaUnavailable: Kafka does not answer.
        """
        now = self._clock.monotonic()
        if now - self._checked_at > _FRESH_SECONDS and not self.lost.is_set():
            if any(m.client.startswith(self._member) for m in await self._admin.group_members(self._group, "Read")):
                self._checked_at = now
            else:
                self.lost.set()
        if self.lost.is_set():
            raise LeaseLost(
                f"{self._group}: another process may have taken over, because this one was silent for a while; "
                "it stops here. Its progress is stored: start it again to continue"
            )

    async def release(self) -> None:
        """Leave the group, so that the next process need not wait."""
        consumer, self._consumer = self._consumer, None
        if consumer:
            await consumer.drain(Deadline(self._clock, _LEAVE_SECONDS))
            await consumer.stop()

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        if partitions:
            self._assigned.set()

    async def on_revoked(self, partitions: Sequence[TopicPartition], deadline: Deadline) -> CommitOffsets:
        self.lost.set()
        return {}

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.lost.set()

    async def _join(self) -> bool:
        """Join the group, and stay if the partition is assigned to this process."""
        since = datetime.fromtimestamp(self._clock.time(), UTC).strftime("%Y-%m-%dT%H.%M.%SZ")
        name = f"lease-a-process-since-{since}-{chance.token_hex(2)}"  # the holder's name for other processes
        self._member = f"headrace-{name}"
        self.lost.clear()
        self._assigned.clear()
        self._consumer = Consumer(
            self._admin,
            name=name,
            group=self._group,
            topics=[LOCK_TOPIC],
            listener=self,
            flow=FlowControl(),
            clock=self._clock,
            policy=ReadPolicy(replaces_client=False),
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
            self._checked_at = self._clock.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._assigned.wait()
                return not self.lost.is_set()
            consumer.require_rights([LOCK_TOPIC])
            members = await self._admin.group_members(self._group, "Read")
            if others := [m for m in members if m.partitions and not m.client.startswith(self._member)]:
                self.holder = others[0].client.removeprefix("headrace-lease-")  # two joined at the same time
                return False
        raise KafkaUnavailable(f"{self._group}: not assigned within {_JOIN_SECONDS:g} s: {consumer.readiness().reason}")
