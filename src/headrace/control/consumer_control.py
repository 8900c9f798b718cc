"""Live control of consumers: pauses, changed settings, seeks and skips, kept in the control table.

Every process reads the table and does what concerns the partitions it has. So a command may be given to any process,
follows its partition over rebalances, and outlives restarts.

A process does a command after it has read the table to its end, so what another one has done and said is not done
again. A crash between a seek's commit and its word in the table has it done once more by the next owner: the records
delivered in between come again, none is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from headrace.control.entries import Command, command_of, key_of, live_settings, paused_text, place_of
from headrace.control.running_consumer import RunningConsumer
from headrace.delivery.pump import Pump
from headrace.errors import HeadraceError, RequestError
from headrace.kafka import CompactedTable
from headrace.lifecycle import Clock, Service
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

NOT_READ = "the control state is not read yet"
_AGAIN_SECONDS = 0.5
_COMMITTED_SECONDS = 5.0
_KEPT_SECONDS = 3600.0


class PartitionOutcome(msgspec.Struct, rename="camel"):
    """What became of a command for one partition."""

    topic: str
    partition: int
    offset: int
    """Where it goes on, or which record is skipped."""
    outcome: str
    """`sought`, `skipped`, `will be skipped` (it is not here yet, or under way), `ended already`, `refused`, `pending`
    or `taken back`."""
    came_from: int | None = None
    """The first record that had not ended when it was sought."""
    by: str = ""
    """The process that did it."""
    why: str = ""


class ConsumerControl(Service):
    """Does in this process what the table says, and writes to the table what is asked of this process."""

    def __init__(
        self,
        table: CompactedTable[Any],
        consumers: dict[str, RunningConsumer],
        member: str,
        lag_of: Callable[[str], Collection[TopicPartition]],
        clock: Clock,
    ) -> None:
        """Prepare.

        Args:
            table: The entries that all processes read.
            consumers: The consumers of this process by name; `add` and `remove` change it.
            member: This process's name for people.
            lag_of: Returns the partitions of a group, as far as this process knows them.
            clock: Time.
        """
        super().__init__("consumer control")
        self.table = table
        self.consumers = consumers
        self.member = member
        self._lag_of = lag_of
        self._clock = clock
        self._wake = asyncio.Event()
        self._heard = asyncio.Event()
        self._rounds: set[str] = set()
        self._unsaid: dict[str, dict[str, Mapping[str, Any] | None]] = {}
        self._skipped: dict[str, tuple[int, float]] = {}  # key to the assignment in which it was done, and when

    async def start(self) -> None:
        for prefix, on_change in (
            ("hold/", self._on_hold),
            ("settings/", self._on_settings),
            ("seek/", self._on_command),
            ("skip/", self._on_command),
            ("done/", lambda key, entry: self._heard.set()),
        ):
            self.table.watch(prefix, on_change)
        self.spawn(self._let_go(), "let go")
        self.spawn(self._serve(), "commands")
        self.spawn(self._tidy(), "tidy")

    def add(self, consumer: RunningConsumer) -> None:
        """Steer a consumer from now on; before its source starts."""
        self.consumers[consumer.name] = consumer
        if self.table.is_loaded.is_set():
            for prefix, apply in (("hold/", self._on_hold), ("settings/", self._on_settings)):
                for key, entry in self.of(consumer, prefix).items():
                    apply(key, entry)
        elif not self.table.known.is_set():
            consumer.pumps[0].hold(None, NOT_READ)
        self._wake.set()

    def remove(self, name: str) -> None:
        """Steer a consumer no longer; its entries stay."""
        self.consumers.pop(name, None)

    def of(self, consumer: RunningConsumer, prefix: str) -> dict[str, Mapping[str, Any]]:
        """Return a consumer's entries of one kind (`hold/`)."""
        own = key_of(prefix, consumer.name)
        return {key: entry for key, entry in self.table.items(own).items() if key[len(own) :][:1] in ("", "/")}

    def hold_of(self, consumer: RunningConsumer) -> Mapping[str, Any] | None:
        """Return who has a consumer stand still as a whole, if anybody does."""
        return self.table.get(key_of("hold/", consumer.name))

    def holds_of(self, consumer: RunningConsumer) -> dict[TopicPartition, Mapping[str, Any]]:
        """Return who has which of its partitions stand still."""
        placed = [(place_of(key), entry) for key, entry in self.of(consumer, "hold/").items()]
        return {place.partition: entry for place, entry in placed if place and place.partition}

    def topics_of(self, consumer: RunningConsumer) -> list[str]:
        """Return the topics it reads, as far as this process knows."""
        here = {partition.topic for partition in consumer.pumps[0].lanes}
        known = {partition.topic for partition in self._lag_of(consumer.group) if consumer.reads(partition.topic)}
        return sorted({*consumer.topics, *here, *known})

    def pending(self, consumer: RunningConsumer) -> list[Command]:
        """Return what no process has done yet."""
        return [command for command in self._commands(consumer) if not self.table.get(command.done)]

    def _commands(self, consumer: RunningConsumer) -> list[Command]:
        entries = {**self.of(consumer, "seek/"), **self.of(consumer, "skip/")}
        return [command for key, entry in entries.items() if (command := command_of(key, entry))]

    async def command(
        self,
        consumer: RunningConsumer,
        action: str,
        offsets: Mapping[TopicPartition, int],
        facts: Mapping[str, Any],
        wait_seconds: float,
    ) -> tuple[str, list[PartitionOutcome]]:
        """Give a command (`seek` or `skip`) for partitions, and wait so long for whoever has them.

        Returns:
            The command's id, and what became of it for each partition until then.
        """
        name, identity, get = consumer.name, uuid.uuid4().hex[:12], self.table.get
        commands = [
            Command(
                key_of(f"{action}/", name, *at, identity), action, at, offset, {"offset": offset, **facts}, identity
            )
            for at, offset in offsets.items()
        ]
        await self.table.put_all({one.key: one.entry for one in commands})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                while any(get(one.key) and not get(one.done) for one in commands):
                    self._heard.clear()
                    await self._heard.wait()
        return identity, [self._outcome(command) for command in commands]

    async def take_back(self, consumer: RunningConsumer, identity: str) -> list[TopicPartition]:
        """Take a command away where it is not done yet; return these partitions."""
        await self.table.catch_up()  # it may have been given to another process just before
        pending = [command for command in self.pending(consumer) if command.id == identity]
        if pending:
            await self.table.put_all(dict.fromkeys([command.key for command in pending]))
        return [command.partition for command in pending]

    def _outcome(self, command: Command) -> PartitionOutcome:
        said = self.table.get(command.done)
        if not said:
            outcome = "pending" if self.table.get(command.key) else "taken back"
            return PartitionOutcome(*command.partition, command.offset, outcome)
        told = (str(said.get(name, "")) for name in ("by", "why"))
        return PartitionOutcome(*command.partition, command.offset, str(said.get("outcome")), said.get("from"), *told)

    # What the table says ---------------------------------------------------------------------------------------------

    async def _let_go(self) -> None:
        await self.table.known.wait()
        for consumer in self.consumers.values():
            if not self.hold_of(consumer):
                consumer.pumps[0].release_hold(None)

    def _on_hold(self, key: str, entry: Mapping[str, Any] | None) -> None:
        place = place_of(key)
        consumer = self.consumers.get(place.name) if place else None
        if place and consumer:
            partitions = [place.partition] if place.partition else None
            for pump in consumer.pumps if partitions else consumer.pumps[:1]:
                if entry is None:
                    pump.release_hold(partitions)
                else:
                    pump.hold(partitions, paused_text(entry))

    def _on_settings(self, key: str, entry: Mapping[str, Any] | None) -> None:
        place = place_of(key)
        if place and (consumer := self.consumers.get(place.name)):
            self._change(consumer, entry)

    def _change(self, consumer: RunningConsumer, entry: Mapping[str, Any] | None) -> None:
        try:
            settings = live_settings(consumer.delivery, entry or {})
        except ValueError as cause:
            log.error("%s: changed settings do not fit the file and are passed over: %s", consumer.name, cause)
            settings = live_settings(consumer.delivery, {})
        consumer.pumps[0].change(settings)

    def _on_command(self, key: str, entry: Mapping[str, Any] | None) -> None:
        self._heard.set()
        self._wake.set()

    # Doing commands --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            self._wake.clear()
            waiting = False
            for name, consumer in self.consumers.items():
                unsaid = name in self._unsaid
                waiting = waiting or unsaid or bool(self._commands(consumer))
                if name not in self._rounds and (unsaid or self._due(consumer)):
                    self._rounds.add(name)
                    self.spawn(self._round(consumer), "round")
            with contextlib.suppress(TimeoutError):
                # Whoever is assigned the partition next is not told of it; so it looks again.
                async with asyncio.timeout(_AGAIN_SECONDS if waiting else None):
                    await self._wake.wait()

    def _due(self, consumer: RunningConsumer) -> list[tuple[Command, Pump]]:
        """Return what can be done here, and is not done already."""
        done = self._unsaid.get(consumer.name, ())
        commands = [command for command in self._commands(consumer) if command.key not in done]
        return [(one, pump) for one in commands for pump in consumer.pumps if one.partition in pump.lanes]

    async def _round(self, consumer: RunningConsumer) -> None:
        """Do what is due for one consumer, and say so; what cannot be said is said later and not done again."""
        try:
            if any(command.key not in self._skipped for command, _ in self._due(consumer)):
                await self.table.catch_up()
            said = self._unsaid.setdefault(consumer.name, {})
            await asyncio.gather(*[self._do(consumer, command, pump, said) for command, pump in self._due(consumer)])
            if said:
                await self.table.put_all(said)
            del self._unsaid[consumer.name]
        except HeadraceError as error:
            log.warning("%s: a command is not done or not told yet: %s", consumer.name, error.description)
        finally:
            self._rounds.discard(consumer.name)

    async def _do(
        self, consumer: RunningConsumer, command: Command, pump: Pump, said: dict[str, Mapping[str, Any] | None]
    ) -> None:
        partition, lane = command.partition, pump.lanes.get(command.partition)
        if lane is None:  # it went while this waited for its turn
            return
        told: dict[str, Any] = {"by": self.member, "at": self._clock.time()}
        tracker = lane.tracker
        if command.action == "skip":
            epoch, since = self._skipped.get(command.key, (None, 0.0))
            if epoch == tracker.epoch:
                # Until the commit that tells of it is old, whoever has the partition after a crash must do it again.
                old = self._clock.monotonic() - since > _COMMITTED_SECONDS
                if old and (tracker.commit_offset or 0) > command.offset:
                    del self._skipped[command.key]
                    said[command.key] = None
                return
        try:
            if command.action == "seek":
                told |= {"from": tracker.frontier, "to": command.offset}
                outcome = "sought" if await pump.seek(partition, command.offset) else "not assigned"
            else:
                outcome = pump.skip(partition, command.offset, str(command.entry.get("reason", "")))
        except RequestError as error:
            outcome, told["why"] = "refused", error.description
        if outcome == "not assigned":
            return
        said[command.done] = {**told, "outcome": outcome}
        if command.action == "skip":
            self._skipped[command.key] = tracker.epoch, self._clock.monotonic()
        else:
            # What was skipped before comes again, if the seek goes back.
            others = [one.key for one in self._commands(consumer) if one.partition == partition]
            said |= dict.fromkeys([command.key, *(key for key in others if key in self._skipped)])
        log.info("%s: %s by %s: %s", partition, command.action, command.entry.get("by"), outcome)

    async def _tidy(self) -> None:
        while True:
            await self._clock.sleep(_KEPT_SECONDS / 4)
            self._skipped = {key: done for key, done in self._skipped.items() if self.table.get(key)}
            limit = self._clock.time() - _KEPT_SECONDS
            told = {key: entry.get("at") for key, entry in self.table.items("done/").items()}
            old = [key for key, at in told.items() if not isinstance(at, int | float) or at < limit]
            if old:
                with contextlib.suppress(HeadraceError):
                    await self.table.put_all(dict.fromkeys(old))
