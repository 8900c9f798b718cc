"""Watches a run of push: what must never happen, and what must have happened in the end.

A record is known by its value, so it is the same one in its topic, in retry topics and as a dead letter. A commit may
pass it when the backend has responded that it took it, or when a later topic has it. The logs of the brokers are true.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.partition_log import PartitionLog
from headrace_devkit.simulation.world import World

Position = tuple[str, int, int]
Lane = tuple[str, int, bytes | None]


class ProducedRecord(NamedTuple):
    """A record that the scenario wrote."""

    value: bytes
    topic: str
    partition: int
    offset: int
    key: bytes | None


class Rules(NamedTuple):
    """What holds in a run, from its settings."""

    ordering: str
    attempts: int
    drain_seconds: float
    """How long a revoked partition may be in flight."""
    topics: Sequence[str]
    """The source topics, then the retry topics in their order, then the dead letter topics."""
    sources: int
    """How many of them are source topics."""
    closing_fails: bool = False
    """Whether a record may fail because the connection is closed each time."""
    blocks_keys: bool = False
    """Whether records of a key wait in the retry topic with the one that failed."""

    @property
    def keeps_order(self) -> bool:
        """Whether failures keep the order: not with retry topics, unless keys are blocked meanwhile."""
        return self.ordering != "none" and (self.blocks_keys or len(self.topics) == self.sources + 1)


class PushChecker:
    """Checks the deliveries and commits of one group."""

    def __init__(self, world: World, brokers: Brokers, rules: Rules) -> None:
        self.records: dict[bytes, ProducedRecord] = {}
        self._world = world
        self._brokers = brokers
        self._rules = rules
        # What happened
        self._taken: set[bytes] = set()
        self._failures: dict[bytes, int] = defaultdict(int)
        self._at_work: dict[bytes, dict[str, float]] = defaultdict(dict)
        """By record: since when each process has it at the backend."""
        self._lanes: dict[Lane, list[bytes]] = defaultdict(list)
        self._first_open: dict[Lane, int] = defaultdict(int)
        self._committed: dict[tuple[str, str, int], int] = {}
        self._topics_of: dict[bytes, set[str]] = defaultdict(set)
        """The retry and dead letter topics that have a record."""
        self._seen: dict[tuple[str, int], int] = defaultdict(int)
        self._disturbed: dict[str, float] = {}
        """Until when a process may not know what the group has decided."""
        self._stopped: set[str] = set()
        for name, call in (
            ("arrived", self._on_arrived),
            ("taken", self._on_taken),
            ("refused", self._on_refused),
            ("unanswered", self._on_unanswered),
            ("commit", self._on_commit),
            ("kill", self._on_kill),
            ("stop", self._on_stop),
            ("pause", self._on_disturbed),
            ("cut", self._on_disturbed),
        ):
            world.watch(name, call)

    def produced(self, record: ProducedRecord) -> None:
        """Take a record that the scenario has written."""
        self.records[record.value] = record
        self._lanes[self._lane(record)].append(record.value)

    def disturb(self, seconds: float, *processes: str) -> None:
        """Expect that processes do not know for this time, and a drain longer, what their group has decided."""
        for process in processes:
            self._on_disturbed(process, seconds)

    def is_completed(self, value: bytes) -> bool:
        """Whether the backend took a record, or it is a dead letter; what is in a retry topic is not completed."""
        return value in self._taken or self._has(value, self._rules.topics[-1:])

    def open_records(self) -> list[ProducedRecord]:
        """Return what is not completed."""
        self._read_logs()
        return [one for value, one in self.records.items() if not self.is_completed(value)]

    def lag(self, committed: Mapping[tuple[str, int], int]) -> int:
        """Return how many records of the source topics are not committed."""
        logs = [log for topic in self._rules.topics[: self._rules.sources] for log in self._logs(topic)]
        return sum(log.end - committed.get((log.topic, log.partition), 0) for log in logs)

    def _logs(self, topic: str) -> list[PartitionLog]:
        found = self._brokers.topics.get(topic)
        return found.partitions if found else []

    def _has(self, value: bytes, topics: Iterable[str]) -> bool:
        return any(topic in self._topics_of[value] for topic in topics) if value in self._topics_of else False

    def _lane(self, record: ProducedRecord) -> Lane:
        return record.topic, record.partition, record.key if self._rules.ordering == "key" else None

    def _value_at(self, topic: str, partition: int, offset: int) -> bytes | None:
        log = self._brokers.log(topic, partition)
        if log is None:
            return None
        records = log.records
        index = offset - records[0].offset if records else 0
        return records[index].value if 0 <= index < len(records) else None

    def _read_logs(self) -> None:
        """Take what was written to retry and dead letter topics since the last time."""
        for topic in self._rules.topics[self._rules.sources :]:
            for log in self._logs(topic):
                at = self._seen[topic, log.partition]
                for record in log.records[at:]:
                    if record.value is not None:
                        self._topics_of[record.value].add(topic)
                        self._check_dead_letter(topic, record.value)
                self._seen[topic, log.partition] = len(log.records)

    def _check_dead_letter(self, topic: str, value: bytes) -> None:
        waits = self._rules.blocks_keys and topic != self._rules.topics[-1]
        if not waits and self._failures[value] < self._rules.attempts:
            text = f"{topic} has {value!r} after {self._failures[value]} failures of {self._rules.attempts}"
            self._world.problem("FAILED-EARLY", text)

    def _calm(self, process: str) -> bool:
        return self._world.now >= self._disturbed.get(process, 0.0)

    def _may_pass(self, value: bytes, topic: str) -> bool:
        """Whether a commit in a topic may pass a record."""
        later = self._rules.topics[max(self._rules.sources, self._rules.topics.index(topic) + 1) :]
        return self._is_done(value) or self._has(value, later)

    def _is_done(self, value: bytes) -> bool:
        """Whether a record needs no further delivery, as far as its destination is concerned."""
        return value in self._taken

    # What a run reports

    def _on_arrived(self, process: str, topic: str, partition: int, offset: int, attempt: int) -> None:
        value = self._value_at(topic, partition, offset)
        if value is None or value not in self.records:
            self._world.problem("UNKNOWN-RECORD", f"{process} delivered {topic}-{partition} {offset}: {value!r}")
            return
        others = {name: since for name, since in self._at_work[value].items() if name != process}
        for other, since in others.items():
            recent = self._world.now < since + self._rules.drain_seconds
            if recent and self._calm(process) and self._calm(other):
                self._world.problem("AT-TWO", f"{process} and {other} deliver {topic}-{partition} {offset} {value!r}")
        self._at_work[value][process] = self._world.now
        if self._rules.keeps_order and self._calm(process):
            self._check_order(process, self.records[value])

    def _check_order(self, process: str, record: ProducedRecord) -> None:
        if self._rules.ordering == "key" and record.key is None:
            return
        lane = self._lane(record)
        values, at = self._lanes[lane], self._first_open[lane]
        while at < len(values) and self.is_completed(values[at]):
            at += 1
        self._first_open[lane] = at
        if at < len(values) and self.records[values[at]].offset < record.offset:
            self._read_logs()
            for value in values[at:]:
                earlier = self.records[value]
                if earlier.offset >= record.offset:
                    return
                if not self.is_completed(value) and process not in self._at_work[value]:
                    where = f"{record.topic}-{record.partition}"
                    text = f"{process} delivered {where} {record.offset} before {earlier.offset} was completed"
                    self._world.problem("ORDER", text)
                    return

    def _on_taken(self, process: str, topic: str, partition: int, offset: int, _status: int) -> None:
        if value := self._ended(process, topic, partition, offset):
            self._taken.add(value)

    def _on_refused(self, process: str, topic: str, partition: int, offset: int, status: int) -> None:
        if (value := self._ended(process, topic, partition, offset)) and status in (200, 500):
            self._failures[value] += 1

    def _on_unanswered(self, process: str, topic: str, partition: int, offset: int, _status: int) -> None:
        if (value := self._ended(process, topic, partition, offset)) and self._rules.closing_fails:
            self._failures[value] += 1

    def _ended(self, process: str, topic: str, partition: int, offset: int) -> bytes | None:
        value = self._value_at(topic, partition, offset)
        if value is not None:
            self._at_work[value].pop(process, None)
        return value

    def _on_commit(self, group: str, topic: str, partition: int, offset: int, member: str, error: int) -> None:
        if error or topic not in self._rules.topics:
            return
        key = group, topic, partition
        before = self._committed.get(key, 0)
        if offset < before:
            self._world.problem("COMMIT-BACK", f"{group}, {topic}-{partition}: {before} to {offset} by {member}")
        self._read_logs()
        for at in range(before, offset):
            value = self._value_at(topic, partition, at)
            if value is not None and not self._may_pass(value, topic):
                self._world.problem("COMMIT-PASSES", f"{group}, {topic}-{partition}: {offset} passes {at} {value!r}")
                break
        self._committed[key] = max(offset, before)

    def _on_kill(self, process: str) -> None:
        for at_work in self._at_work.values():
            at_work.pop(process, None)

    def _on_stop(self, process: str) -> None:
        """Expect at a second one that what is in flight is not waited for; a destination may still do it."""
        if process in self._stopped:
            self._on_disturbed(process, 0.0)
        self._stopped.add(process)

    def _on_disturbed(self, process: str, seconds: float, *_how: bool) -> None:
        until = self._world.now + seconds + self._rules.drain_seconds
        self._disturbed[process] = max(self._disturbed.get(process, 0.0), until)
