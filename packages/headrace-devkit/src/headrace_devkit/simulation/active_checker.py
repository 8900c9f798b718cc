"""Watches clients of active consumers: what they receive and commit, against the log and the offsets of their group.

A record is known by its partition and offset. What a client has received is certain when it has read the last byte of
the response. Behind another process, what the client's system has received counts as received: the docs say so.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace_devkit.simulation.simulated_kafka import SimulatedKafka

_CALM_SECONDS = 30.0
"""How long after a fault a process may not know what its group has decided."""


class ExpectedRecord(NamedTuple):
    """What a client must receive next of a partition."""

    assignment: str
    offset: int
    is_exact: bool
    """Whether it must be this record; else this one or an earlier one."""


class Acknowledged(NamedTuple):
    """What a group had committed at a moment."""

    offsets: Mapping[int, int]
    seeks: Mapping[int, int]


class ReadingClient:
    """What one client knows of its instance."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.expected: dict[int, ExpectedRecord] = {}
        self.unknown: set[int] = set()
        """Partitions whose next record may be any."""
        self.wild: set[int] = set()
        """Partitions of which a seek may be done at any time, because its response was lost."""

    def lose_response(self) -> None:
        """A response was lost: its records come again, and nothing is passed over."""
        self.expected = {partition: one._replace(is_exact=False) for partition, one in self.expected.items()}


class GroupChecker:
    """Checks the reads and commits of the clients of one group."""

    def __init__(self, kafka: SimulatedKafka, group: str, topic: str) -> None:
        self.group = group
        self._world = kafka.network.world
        self._kafka = kafka
        self._topic = topic
        self.received: dict[int, set[int]] = defaultdict(set)
        self.passed_over: dict[int, int] = defaultdict(int)
        """By partition: a client has sought to this offset, so records before it may never be read."""
        self._acknowledged: dict[int, int] = {}
        self._committed: dict[int, int] = defaultdict(int)
        self._highest: dict[int, int] = defaultdict(int)
        self._seeks: dict[int, int] = defaultdict(int)
        self._sought_back: dict[int, int] = {}
        """The lowest offset that a client has sought since the last commit."""
        self._disturbed_until = 0.0
        self._world.watch("commit", self._on_commit)
        for name in ("pause", "cut"):
            self._world.watch(name, lambda _name, seconds, *_how: self.disturb(seconds))
        for name in ("kill", "stop"):
            self._world.watch(name, lambda *_values: self.disturb(0))

    # What happens

    def disturb(self, seconds: float, *_processes: str) -> None:
        """A process, its network or a broker is away."""
        self._disturbed_until = max(self._disturbed_until, self._world.now + seconds + _CALM_SECONDS)

    @property
    def is_calm(self) -> bool:
        return self._world.now > self._disturbed_until

    def was_calm_since(self, at: float) -> bool:
        """Whether there was no fault, and none that was felt still, since a time."""
        return self._disturbed_until <= at

    def acknowledged(self) -> Acknowledged:
        """Return what is certainly committed now: reads that begin later must not have it."""
        return Acknowledged(dict(self._acknowledged), dict(self._seeks))

    def commit_acknowledged(self, offsets: Iterable[tuple[int, int]]) -> None:
        """A client has learnt that its commit is done."""
        for partition, offset in offsets:
            self._acknowledged[partition] = max(offset, self._acknowledged.get(partition, 0))

    def seeks(self, client: ReadingClient, partition: int, offset: int, *, passes_over: bool) -> None:
        """A client sends a seek, which may be done now or later, or not."""
        self._seeks[partition] += 1
        self._acknowledged[partition] = min(offset, self._acknowledged.get(partition, 0))
        self._sought_back[partition] = min(offset, self._sought_back.get(partition, offset))
        if passes_over:
            self.passed_over[partition] = max(offset, self.passed_over[partition])
        client.unknown.add(partition)

    def sought(self, client: ReadingClient, partition: int, offset: int) -> None:
        """A client has learnt that its seek is done."""
        if before := client.expected.get(partition):
            client.expected[partition] = ExpectedRecord(before.assignment, offset, True)
            client.unknown.discard(partition)

    def perhaps_receives(self, client: ReadingClient, records: Iterable[Mapping[str, Any]]) -> None:
        """The system of a client has records that its process never reads."""
        for one in records:
            self.received[one["partition"]].add(one["offset"])
            client.unknown.add(one["partition"])

    def receives(self, client: ReadingClient, records: Iterable[Mapping[str, Any]], since: Acknowledged | None) -> None:
        """Take records that a client has read; `since` is what was committed when it sent the request."""
        for one in records:
            partition, offset, assignment = one["partition"], one["offset"], one.get("assignment", "")
            self._world.note("received", self.group, partition, offset, assignment)
            self._check_position(client, partition, offset, assignment)
            is_sought = since is None or since.seeks.get(partition, 0) != self._seeks[partition]
            if since and self.is_calm and not is_sought:
                before = since.offsets.get(partition, 0)
                if offset < before:
                    self._problem("REPEATED", f"{partition}: {offset} was committed, up to {before}, and comes again")
            self.received[partition].add(offset)
            client.expected[partition] = ExpectedRecord(assignment, offset + 1, True)
            client.unknown.discard(partition)

    def _check_position(self, client: ReadingClient, partition: int, offset: int, assignment: str) -> None:
        expected = client.expected.get(partition)
        if partition in client.unknown or partition in client.wild:
            return
        if expected and expected.assignment == assignment:
            # After a fault it may be unknown that the last response has arrived: then its records come again.
            again = offset < expected.offset and expected.is_exact and self.is_calm
            if offset > expected.offset or again:
                how = "" if expected.is_exact else " or an earlier one"
                self._problem("ORDER", f"{partition}: {offset} comes, and not {expected.offset}{how}")
            return
        committed = self._kafka.groups.offsets.committed(self.group).get((self._topic, partition))
        highest = max(self._highest[partition], committed.offset if committed else 0, self.passed_over[partition])
        if offset > highest:
            self._problem("SKIPPED", f"{partition}: an assignment begins at {offset}, and {highest} is committed")

    def _on_commit(self, group: str, topic: str, partition: int, offset: int, member: str, error: int) -> None:
        if error or group != self.group or topic != self._topic:
            return
        before = self._committed[partition]
        if offset < before:
            if offset < self._sought_back.get(partition, before):
                self._problem("BACK", f"{partition}: {before} to {offset}, without a seek, by {member}")
        else:
            passed = range(max(before, self.passed_over[partition]), offset)
            missing = [one for one in passed if one not in self.received[partition]]
            if missing:
                self._problem("PASSES", f"{partition}: {offset} passes {missing[:3]}, which no client has received")
        self._committed[partition] = offset
        self._highest[partition] = max(offset, self._highest[partition])

    # The end

    def missing(self) -> list[tuple[int, int]]:
        """Return partition and offset of each record that no client has received."""
        return [
            (partition, offset)
            for partition, end in self._ends().items()
            for offset in range(self.passed_over[partition], end)
            if offset not in self.received[partition]
        ]

    def lag(self) -> int:
        """Return how many records are not committed, without those that a client has passed over."""
        committed = self._kafka.groups.offsets.committed(self.group)
        found = {partition: committed.get((self._topic, partition)) for partition in self._ends()}
        reached = {
            partition: max(at.offset if at else 0, self.passed_over[partition]) for partition, at in found.items()
        }
        return sum(max(0, end - reached[partition]) for partition, end in self._ends().items())

    def end_of(self, partition: int) -> int:
        return self._ends()[partition]

    def _ends(self) -> dict[int, int]:
        return {log.partition: log.end for log in self._kafka.brokers.topics[self._topic].partitions}

    def _problem(self, kind: str, text: str) -> None:
        self._world.problem(kind, f"{self.group}: {text}")
