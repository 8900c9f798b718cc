"""Live control of consumers: pauses, changed settings, seeks and skips, kept in the control table.

Every process reads the table and applies the entries of its partitions. So every process accepts commands, a command
follows its partition over rebalances, and it survives restarts.

A process reads the table to its end before it runs a command, so it does not repeat what another process has finished.
After a crash between the commit of a seek and its outcome in the table, the next process repeats the seek. The records
delivered in between are then delivered again, and none is lost.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.commands.entries import Command, command_of, key_of, live_settings, parse_key, paused_text
from headrace.commands.reconciler import Reconciler
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.pump import Pump
from headrace.errors import HeadraceError, InvalidRequest, RequestError
from headrace.kafka import CompactedTable
from headrace.records import Offsets, TopicPartition
from headrace.runtime import Clock, chance

log = logging.getLogger(__name__)

NOT_READ = "the control state is not read yet"
_AGAIN_SECONDS = 0.5
_MAX_UNFINISHED = 10_000
_PENDING = (
    "no process has run the command for the pending partitions yet: they are not assigned, or their process is busy; "
    "DELETE cancels it"
)
_OUTCOMES_OF_0_2 = {"ended already": "already completed"}
"""Words of a process of the version before this one, which may have the partition during an upgrade."""

Entry = Mapping[str, Any]


class PartitionOutcome(msgspec.Struct, rename="camel"):
    """The outcome of a command for one partition."""

    topic: str
    partition: int
    offset: int
    """The offset to resume at, or the offset of the skipped record."""
    outcome: str
    """`sought`, `skipped`, `will be skipped` (when the partition reaches it), `already completed`, `refused`,
    `pending` or `cancelled`."""
    came_from: int | None = None
    """The first record that was not completed at the time of the seek."""
    by: str = ""
    """The process that ran the command."""
    why: str = ""


class CommandResponse(msgspec.Struct, rename="camel"):
    """The outcome of a command so far."""

    id: str
    pending: bool
    """Whether a partition still waits for its process."""
    results: Sequence[PartitionOutcome]
    why: str = ""


class ConsumerControl(Reconciler):
    """Applies the control table to the consumers of this process, and writes commands to the table."""

    def __init__(
        self,
        table: CompactedTable[Any],
        consumers: dict[str, RunningConsumer],
        member: str,
        lag_of: Callable[[str], Collection[TopicPartition]],
        clock: Clock,
    ) -> None:
        """Prepare; `add` and `remove` change `consumers`, and `member` is the display name of this process.

        `lag_of` returns the partitions of a group that this process knows.
        """
        super().__init__("consumer control", table, clock)
        self.consumers = consumers
        self.member = member
        self._lag_of = lag_of
        self._requests: dict[str, asyncio.Future[Entry | None]] = {}
        self._commands: defaultdict[str, dict[str, Command]] = defaultdict(dict)
        """The commands in the table by key, for each consumer by its encoded name."""
        self._busy: set[tuple[str, TopicPartition | None]] = set()
        """Consumers and partitions of the rounds that run; None for a round that only writes outcomes."""
        self._unwritten: dict[str, dict[str, Entry]] = {}

    async def start(self) -> None:
        self.table.watch("hold/", self._on_hold)
        self.table.watch("settings/", self._on_settings)
        self.watch("seek/", self._on_command)
        self.watch("skip/", self._on_command)
        await super().start()
        self.keep(self._release_at_start, "release at start")

    def add(self, consumer: RunningConsumer) -> None:
        """Control a consumer from now on; call before its Kafka consumer starts."""
        earlier = self.consumers.get(consumer.name)
        self.consumers[consumer.name] = consumer
        if self.table.is_loaded.is_set():
            for prefix, apply in (("hold/", self._on_hold), ("settings/", self._on_settings)):
                for key, entry in self.of(consumer, prefix).items():
                    apply(key, entry)
        elif not self.table.known.is_set():
            consumer.pump.pause(None, NOT_READ)
        elif earlier:  # the table is being read again
            consumer.pump.pause_like(earlier.pump)
        self.wake()

    def remove(self, name: str) -> None:
        """Stop controlling a consumer; its entries stay."""
        self.consumers.pop(name, None)

    def of(self, consumer: RunningConsumer, prefix: str) -> dict[str, Entry]:
        """Return a consumer's entries of one kind (`hold/`)."""
        own = key_of(prefix, consumer.name)
        return {key: entry for key, entry in self.table.items(own).items() if key[len(own) :][:1] in ("", "/")}

    def hold_of(self, consumer: RunningConsumer) -> Entry | None:
        """Return the entry that pauses a consumer entirely."""
        return self.table.get(key_of("hold/", consumer.name))

    def holds_of(self, consumer: RunningConsumer) -> dict[TopicPartition, Entry]:
        """Return the entries that pause single partitions of a consumer."""
        parsed = [(parse_key(key), entry) for key, entry in self.of(consumer, "hold/").items()]
        return {key.partition: entry for key, entry in parsed if key and key.partition}

    def topics_of(self, consumer: RunningConsumer) -> list[str]:
        """Return the topics it reads that this process knows."""
        here = {partition.topic for partition in consumer.pump.lanes}
        known = {partition.topic for partition in self._lag_of(consumer.group) if consumer.reads(partition.topic)}
        return sorted({*consumer.topics, *here, *known})

    def commands_of(self, consumer: RunningConsumer) -> list[Command]:
        """Return the seeks and skips that are not finished."""
        return list(self._commands.get(key_of("", consumer.name), {}).values())

    async def command(
        self, consumer: RunningConsumer, action: str, offsets: Offsets, facts: Entry, wait_seconds: float
    ) -> CommandResponse:
        """Write a command (`seek` or `skip`) for partitions, and wait for the processes that have them.

        Raises:
            InvalidRequest: Too many commands are not finished.
            KafkaError: It is not, or perhaps not, written.
        """
        unfinished = len(self.commands_of(consumer))
        if unfinished + len(offsets) > _MAX_UNFINISHED:
            raise InvalidRequest(
                f"{unfinished} seeks and skips of {consumer.name} are pending: wait, or cancel some of them"
            )
        command_id = chance.uuid4().hex[:12]
        entries: dict[str, Entry] = {}
        for partition, offset in offsets.items():
            entries[key_of(f"{action}/", consumer.name, *partition, command_id)] = {"offset": offset, **facts}
        outcomes = {key: asyncio.get_running_loop().create_future() for key in entries}
        self._requests |= outcomes
        try:
            await self.table.put_all(entries)
            await asyncio.wait(outcomes.values(), timeout=wait_seconds)
        finally:
            for key in entries:
                del self._requests[key]
        results = [
            _outcome(partition, offset, outcome)
            for (partition, offset), outcome in zip(offsets.items(), outcomes.values(), strict=True)
        ]
        pending = any(result.outcome == "pending" for result in results)
        return CommandResponse(command_id, pending, results, _PENDING if pending else "")

    async def cancel(self, consumer: RunningConsumer, command_id: str) -> list[TopicPartition]:
        """Remove a command for the partitions in which it is pending, and return them."""
        await self.table.catch_up()  # another process may have written it just before
        pending = [each for each in self.commands_of(consumer) if each.id == command_id and not each.outcome]
        if pending:
            await self.table.put_all(dict.fromkeys([command.key for command in pending]))
        return [command.partition for command in pending]

    # State -----------------------------------------------------------------------------------------------------------

    async def _release_at_start(self) -> None:
        await self.table.known.wait()
        for consumer in self.consumers.values():
            if not self.hold_of(consumer):
                consumer.pump.resume(None)

    def _on_hold(self, key: str, entry: Entry | None) -> None:
        parsed = parse_key(key)
        consumer = self.consumers.get(parsed.name) if parsed else None
        if parsed and consumer:
            partitions = [parsed.partition] if parsed.partition else None
            for pump in consumer.pumps if partitions else [consumer.pump]:
                if entry is None:
                    pump.resume(partitions)
                else:
                    pump.pause(partitions, paused_text(entry))

    def _on_settings(self, key: str, entry: Entry | None) -> None:
        parsed = parse_key(key)
        if not (parsed and (consumer := self.consumers.get(parsed.name))):
            return
        try:
            settings = live_settings(consumer.delivery, entry or {})
        except ValueError as cause:
            log.error("%s: ignored changed settings that do not fit the file: %s", consumer.name, cause)
            settings = live_settings(consumer.delivery, {})
        consumer.pump.change(settings)

    # Commands --------------------------------------------------------------------------------------------------------

    def _on_command(self, key: str, entry: Entry | None) -> None:
        name = key.split("/")[1]
        self._commands[name].pop(key, None)
        if entry is not None and (command := command_of(key, entry)):
            self._commands[name][key] = command
        elif not self._commands[name]:
            del self._commands[name]
        request = self._requests.get(key)
        if request and not request.done() and (entry is None or "outcome" in entry):
            request.set_result(entry)

    def reconcile(self) -> float | None:
        """Start a round for each consumer that has commands for partitions of this process without a round."""
        waiting = False
        for name, consumer in self.consumers.items():
            unwritten = bool(self._unwritten.get(name))
            waiting = waiting or unwritten or bool(self.commands_of(consumer))
            partitions: set[TopicPartition | None] = {command.partition for command, _ in self._due(consumer)}
            partitions -= {partition for busy, partition in self._busy if busy == name}
            if not partitions and unwritten and (name, None) not in self._busy:
                partitions = {None}
            if partitions:
                self._busy |= {(name, partition) for partition in partitions}
                self.keep(partial(self._round, consumer, partitions), f"commands of {name}")
        return _AGAIN_SECONDS if waiting else None  # polls, because assignments of partitions are not reported here

    def _due(
        self, consumer: RunningConsumer, among: Collection[TopicPartition | None] | None = None
    ) -> list[tuple[Command, Pump]]:
        """Return the commands for partitions of this process, with the pump of each; `among` limits the partitions."""
        unwritten = self._unwritten.get(consumer.name, ())
        commands = [command for command in self.commands_of(consumer) if command.key not in unwritten]
        commands = [command for command in commands if among is None or command.partition in among]
        return [(each, pump) for each in commands for pump in consumer.pumps if each.partition in pump.lanes]

    async def _round(self, consumer: RunningConsumer, partitions: set[TopicPartition | None]) -> None:
        """Run the due commands of partitions, write outcomes of the consumer, and remove finished commands.

        An outcome that cannot be written is kept and written later; its command is not run again. A command that takes
        long, for example because a commit is refused, delays only later commands of its partition.
        """
        outcomes = self._unwritten.setdefault(consumer.name, {})
        try:
            if any(not command.outcome for command, _ in self._due(consumer, partitions)):
                await self.table.catch_up()
            await asyncio.gather(*[self._run_all(consumer, each, partitions, outcomes) for each in list(partitions)])
            if written := dict(outcomes):
                await self.table.put_all(written)
                if finished := [key for key, entry in written.items() if entry["outcome"] != "will be skipped"]:
                    await self.table.put_all(dict.fromkeys(finished))
                for key, entry in written.items():
                    if outcomes.get(key) is entry:  # otherwise a seek has just cancelled that skip
                        del outcomes[key]
        except HeadraceError as error:
            log.warning("%s: failed to run or save a command, will retry: %s", consumer.name, error.description)
        self._busy -= {(consumer.name, partition) for partition in partitions}

    async def _run_all(
        self,
        consumer: RunningConsumer,
        partition: TopicPartition | None,
        partitions: set[TopicPartition | None],
        outcomes: dict[str, Entry],
    ) -> None:
        """Run the due commands of a partition; then another round may handle it, while other partitions still run."""
        due = self._due(consumer, {partition})
        await asyncio.gather(*[self._run(consumer, command, pump, outcomes) for command, pump in due])
        if partition:
            partitions.discard(partition)
            self._busy.discard((consumer.name, partition))

    async def _run(self, consumer: RunningConsumer, command: Command, pump: Pump, outcomes: dict[str, Entry]) -> None:
        partition, entry = command.partition, command.entry
        lane = pump.lanes.get(partition)
        if command.is_finished:  # a process died before it removed the entry
            outcomes[command.key] = entry
        if command.is_finished or lane is None:
            return
        facts: dict[str, Any] = {"done_by": self.member, "done_at": self._clock.time()}
        try:
            if command.action == "seek":
                facts["from"] = lane.tracker.frontier
                outcome = "sought" if await pump.seeks.seek(partition, command.offset) else "not assigned"
            else:
                outcome = await pump.seeks.skip(partition, command.offset, str(entry.get("reason", "")))
        except RequestError as error:
            outcome, facts["why"] = "refused", error.description
        if outcome == "sought":  # a seek cancels the skips that wait for their record
            skips = [each for each in self.commands_of(consumer) if each.partition == partition and each.outcome]
            outcomes |= {each.key: {**each.entry, "outcome": "cancelled"} for each in skips}
        if outcome not in ("not assigned", command.outcome):
            outcomes[command.key] = {**entry, **facts, "outcome": outcome}
            log.info("%s: %s by %s: %s", partition, command.action, entry.get("by"), outcome)


def _outcome(partition: TopicPartition, offset: int, response: asyncio.Future[Entry | None]) -> PartitionOutcome:
    if not response.done():
        return PartitionOutcome(*partition, offset, "pending")
    entry = response.result()
    if entry is None:
        return PartitionOutcome(*partition, offset, "cancelled")
    by, why, outcome = str(entry.get("done_by", "")), str(entry.get("why", "")), str(entry["outcome"])
    return PartitionOutcome(*partition, offset, _OUTCOMES_OF_0_2.get(outcome, outcome), entry.get("from"), by, why)
