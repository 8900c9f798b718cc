"""The status of a consumer for people: its progress, and why it stalls."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from pydantic.alias_generators import to_camel

from headrace.commands.consumer_control import ConsumerControl
from headrace.commands.entries import Command, iso_time, paused_text
from headrace.consumers.lag import PartitionLag
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.status import PartitionStatus, SettingsInForce
from headrace.errors import HeadraceError
from headrace.records import TopicPartition
from headrace.runtime import Clock

_MEMBERS_SECONDS = 5.0
Members = Mapping[TopicPartition, str]
"""Partition to the display name of the member that has it."""


class Pause(msgspec.Struct, rename="camel"):
    """Who paused it, since when, and why."""

    by: str
    since: str
    reason: str


class BreakerDetails(msgspec.Struct, rename="camel"):
    """Whether records are delivered to the destination."""

    state: Literal["closed", "open", "half-open"]
    until: str | None
    why: str


class KafkaOutage(msgspec.Struct, rename="camel"):
    """Since when no broker of a consumer's cluster responds, and why."""

    since: str
    why: str


class Head(msgspec.Struct, rename="camel"):
    """The first record that is not completed."""

    offset: int
    timestamp: int
    """Timestamp of the record in Kafka, in milliseconds since the epoch."""
    age_seconds: float
    """How long it has been the first."""
    attempts: int


class PartitionDetails(msgspec.Struct, rename="camel"):
    """The progress of a partition, and one sentence that says why it stalls."""

    topic: str
    partition: int
    assigned: bool
    """Whether this process has it."""
    member: str
    """The process that has it; empty if none has it or the process is not known."""
    position: int | None
    committed: int | None
    end: int | None
    lag: int | None
    in_flight: int
    records_in_flight: int
    head: Head | None
    paused: Pause | None
    why: str
    """Empty while it makes progress."""
    key_share: float | None = None
    """With `ordering: key`: the share of the most frequent key in `recordsInFlight`; its records wait for each other.
    Null below 0.2, or with fewer than 50 records."""


class PendingCommand(msgspec.Struct, rename="camel"):
    """A command that no process has run yet."""

    id: str
    action: str
    topic: str
    partition: int
    offset: int
    by: str
    at: str
    reason: str


class Summary(msgspec.Struct, rename="camel"):
    """A consumer, as this process sees it."""

    name: str
    kind: str
    group: str
    topics: Sequence[str]
    destination: str
    owner: str
    paused: Pause | None
    settings: SettingsInForce
    breaker: BreakerDetails
    counts: Mapping[str, int]
    """Of this process, since its start."""
    partitions_assigned: int
    """To this process."""
    lag: int | None
    """Of the whole group; null while unknown."""
    in_flight: int
    records_in_flight: int
    oldest_seconds: float | None
    attempts: int
    why: str
    kafka: KafkaOutage | None
    """Null while a broker responds."""


class Details(Summary):
    """A consumer and its partitions."""

    partitions: Sequence[PartitionDetails]
    commands: Sequence[PendingCommand]


class ConsumerStatuses:
    """The status of consumers as this process knows them; it reads only the members of groups from Kafka."""

    def __init__(
        self, control: ConsumerControl, lag_of: Callable[[str], Mapping[TopicPartition, PartitionLag]], clock: Clock
    ) -> None:
        """Prepare; `lag_of` returns the recent lag of a group."""
        self._control = control
        self._lag_of = lag_of
        self._clock = clock
        self._members: dict[str, tuple[float, Members | None]] = {}

    def summary(self, consumer: RunningConsumer) -> Summary:
        return self._summary(consumer, self._partitions(consumer, None))

    async def details(self, consumer: RunningConsumer) -> Details:
        """Return the status of a consumer and its partitions, with the members that have partitions elsewhere."""
        partitions = self._partitions(consumer, None)
        if not all(each.assigned for each in partitions):
            partitions = self._partitions(consumer, await self._members_of(consumer))
        commands = [_pending(command) for command in self._control.commands_of(consumer) if not command.outcome]
        summary = msgspec.structs.asdict(self._summary(consumer, partitions))
        return Details(**summary, partitions=partitions, commands=commands)

    async def _members_of(self, consumer: RunningConsumer) -> Members | None:
        at, members = self._members.get(consumer.group, (-_MEMBERS_SECONDS, None))
        now = self._clock.monotonic()
        if now - at >= _MEMBERS_SECONDS:
            members = None
            with contextlib.suppress(HeadraceError):
                found = [one for pump in consumer.pumps for one in await consumer.admin.group_members(pump.group)]
                members = {partition: f"{one.client} at {one.host}" for one in found for partition in one.partitions}
            self._members[consumer.group] = now, members
        return members

    def _summary(self, consumer: RunningConsumer, partitions: Sequence[PartitionDetails]) -> Summary:
        own = [each for each in partitions if each.assigned]
        heads = [each.head for each in own if each.head]
        lags = [each.lag for each in partitions if each.lag is not None]
        breaker = consumer.pump.status().breaker
        hold = self._control.hold_of(consumer)
        outage = consumer.admin.reachability.outage
        why = outage.why if outage else next((each.why for each in own if each.why), "")
        counts: Counter[str] = Counter()
        for pump in consumer.pumps:
            counts.update(pump.counts.read())
        return Summary(
            name=consumer.name,
            kind=consumer.kind,
            group=consumer.group,
            topics=consumer.topics,
            destination=consumer.destination_name,
            owner=consumer.owner,
            paused=_pause(hold),
            settings=consumer.pump.settings,
            breaker=BreakerDetails(breaker.state, iso_time(breaker.until) or None, breaker.why),
            counts={to_camel(name): count for name, count in counts.items()},
            partitions_assigned=len(own),
            lag=sum(lags) if lags else None,
            in_flight=sum(each.in_flight for each in own),
            records_in_flight=sum(each.records_in_flight for each in own),
            oldest_seconds=max((head.age_seconds for head in heads), default=None),
            attempts=max((head.attempts for head in heads), default=0),
            why=paused_text(hold) if hold else why,
            kafka=outage and KafkaOutage(iso_time(outage.since), outage.why),
        )

    def _partitions(self, consumer: RunningConsumer, members: Members | None) -> list[PartitionDetails]:
        holds = self._control.holds_of(consumer)
        outage = consumer.admin.reachability.outage
        found = []
        for pump in consumer.pumps:
            own = pump.status().partitions
            lags = self._lag_of(pump.group)
            known = {one for one in lags if pump.group != consumer.group or consumer.reads(one.topic)}
            for partition in sorted(known.union(own)):
                lag, hold, here = lags.get(partition), holds.get(partition), own.get(partition)
                if here:
                    found.append(self._here(partition, here, lag, _pause(hold), outage.why if outage else here.why))
                else:
                    found.append(_away(partition, lag, hold, members))
        return found

    def _here(
        self, partition: TopicPartition, here: PartitionStatus, lag: PartitionLag | None, hold: Pause | None, why: str
    ) -> PartitionDetails:
        end = lag.end if lag else None
        head = here.head
        if not why and lag and lag.written > lag.end == here.position and not here.records_in_flight:
            why = f"a transaction is open at offset {end}; later records cannot be read until it is finished"
        if end is not None and here.position is not None:
            end = max(end, here.position)  # the lag is a few seconds old
        behind = None if end is None or here.committed is None else max(0, end - here.committed)
        return PartitionDetails(
            *partition,
            assigned=True,
            member=self._control.member,
            position=here.position,
            committed=here.committed,
            end=end,
            lag=lag.lag if behind is None and lag else behind,
            in_flight=here.in_flight,
            records_in_flight=here.records_in_flight,
            head=head
            and Head(head.offset, head.timestamp_ms, max(0.0, self._clock.time() - head.since), head.attempts),
            paused=hold,
            why=why,
            key_share=here.key_share,
        )


def _away(
    partition: TopicPartition, lag: PartitionLag | None, hold: Mapping[str, Any] | None, members: Members | None
) -> PartitionDetails:
    member = members.get(partition, "") if members else ""
    why = ""
    if member:
        why = f"another process has it, see the status there: {member}"
    elif members is not None:
        why = "no process of this group has it now"
    return PartitionDetails(
        *partition,
        assigned=False,
        member=member,
        position=None,
        committed=lag and lag.committed,
        end=lag and lag.end,
        lag=lag and lag.lag,
        in_flight=0,
        records_in_flight=0,
        head=None,
        paused=_pause(hold),
        why=paused_text(hold) if hold else why,
    )


def _pending(command: Command) -> PendingCommand:
    by, reason = (str(command.entry.get(name, "")) for name in ("by", "reason"))
    at = iso_time(command.entry.get("at"))
    return PendingCommand(command.id, command.action, *command.partition, command.offset, by, at, reason)


def _pause(entry: Mapping[str, Any] | None) -> Pause | None:
    if not entry:
        return None
    return Pause(str(entry.get("by", "")), iso_time(entry.get("since")), str(entry.get("reason", "")))
