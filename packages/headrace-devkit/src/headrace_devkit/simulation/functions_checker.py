"""Watches a run of functions: what push promises, for each worker, and explicit acknowledgements.

What arrives arrives at a worker, whose name is that of its process and a number. A record is completed when its handler
has succeeded and its output is in its topic, or with its explicit acknowledgement.
"""

from collections import defaultdict
from typing import Any

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.checkers import ProducedRecord, PushChecker, Rules
from headrace_devkit.simulation.world import World

POISON_DEATHS = 3
"""Workers in a row that die of a record before it is a dead letter."""


class FunctionChecker(PushChecker):
    """Checks the events and commits of one group of a function."""

    def __init__(
        self, world: World, brokers: Brokers, rules: Rules, *, output: str, acks: str, by_key: bool, counts: bool
    ) -> None:
        """Prepare.

        Args:
            world: Whose events it watches.
            brokers: Whose logs it reads.
            rules: What holds in the run.
            output: The topic of outputs, if there is one.
            acks: The `explicitAckMode`.
            by_key: Whether workers are by key, so that an acknowledgement completes its own record only.
            counts: Whether a record has no more calls than attempts, as long as its partition stays where it is.
        """
        super().__init__(world, brokers, rules)
        self._output = output
        self._acks = acks
        self._by_key = by_key
        self._counts = counts
        # What happened
        self._written: set[bytes] = set()
        """Records whose output is in its topic."""
        self._held: set[bytes] = set()
        """Records whose last call has succeeded without completing them."""
        self._acknowledged: set[bytes] = set()
        self._accepting: dict[str, set[bytes]] = {}
        """By worker: what its last acknowledgement completes, if it is accepted."""
        self._deaths: dict[bytes, int] = defaultdict(int)
        """Workers that ended while they had a record."""
        self._arrived: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        """Offsets that a worker has had, by worker and partition."""
        self._calls: dict[bytes, int] = defaultdict(int)
        """Failed calls of a record since its partition was assigned, or a worker that had it has ended."""
        self._called: dict[str, set[bytes]] = defaultdict(set)
        """Records that have failed, by worker."""
        for name, call in (
            ("child-end", self._on_child_end),
            ("held", self._on_held),
            ("acknowledges", self._on_acknowledges),
            ("not acknowledged", self._on_not_acknowledged),
            ("on_assign", self._on_assign),
            ("on_lost", self._on_lost),
        ):
            world.watch(name, call)

    def open_records(self) -> list[ProducedRecord]:
        self._read_logs()
        return [one for value, one in self.records.items() if not self._is_closed(value, one)]

    def _is_closed(self, value: bytes, record: ProducedRecord) -> bool:
        """Whether nothing of a record is left to do. One that was acknowledged may have failed later elsewhere."""
        if self._is_done(value) or self._has(value, self._rules.topics[-1:]):
            return True
        where = record.topic, record.partition
        ends = [end for (_, *of), end in self._committed.items() if (*of,) == where]
        return self._acks != "disable" and record.offset < max(ends, default=0)

    def is_completed(self, value: bytes) -> bool:
        """Whether later records may begin: after the last attempt they need not wait for the dead letter."""
        is_last = self._failures.get(value, 0) >= self._rules.attempts or self._deaths.get(value, 0) >= POISON_DEATHS
        return is_last or super().is_completed(value)

    def _calm(self, process: str) -> bool:
        return super()._calm(_process_of(process))

    def _is_done(self, value: bytes) -> bool:
        if value in self._acknowledged:
            return True
        waits = self._acks == "explicitOnly" or value in self._held
        return not waits and value in self._taken and (not self._output or value in self._written)

    def _read_logs(self) -> None:
        super()._read_logs()
        for log in self._logs(self._output) if self._output else ():
            at = self._seen[self._output, log.partition]
            for record in log.records[at:]:
                if record.value is not None:
                    self._written.add(record.value)
            self._seen[self._output, log.partition] = len(log.records)

    def _check_dead_letter(self, topic: str, value: bytes) -> None:
        if self._deaths[value] < POISON_DEATHS:
            super()._check_dead_letter(topic, value)

    # What a run reports

    def _on_arrived(self, process: str, topic: str, partition: int, offset: int, attempt: int) -> None:
        value = self._value_at(topic, partition, offset)
        if value and any(self._is_of(worker, process) for worker in self._at_work[value]):
            self._world.problem("TWICE", f"{process} has {topic}-{partition} {offset}, which another worker has")
        self._arrived[process, topic, partition].add(offset)
        super()._on_arrived(process, topic, partition, offset, attempt)

    def _is_of(self, worker: str, other: str) -> bool:
        return worker != other and _process_of(worker) == _process_of(other)

    def _on_held(self, _process: str, topic: str, partition: int, offset: int) -> None:
        """Take that a handler has succeeded, and its record waits for an acknowledgement."""
        if value := self._value_at(topic, partition, offset):
            self._held.add(value)

    def _on_taken(self, process: str, topic: str, partition: int, offset: int, status: int) -> None:
        super()._on_taken(process, topic, partition, offset, status)
        if value := self._value_at(topic, partition, offset):
            self._held.discard(value)

    def _on_refused(self, process: str, topic: str, partition: int, offset: int, status: int) -> None:
        super()._on_refused(process, topic, partition, offset, status)
        if value := self._value_at(topic, partition, offset):
            self._acknowledged.discard(value)
            self._calls[value] += status == 500  # of several records of a call, none uses an attempt
            self._called[process].add(value)
            most = self._rules.attempts + len(self._rules.topics) - self._rules.sources - 1  # one per retry topic
            if self._counts and self._calls[value] > most and self._calm(process):
                text = f"{process} failed {self._calls[value]} times at {topic}-{partition} {offset}"
                self._world.problem("ATTEMPTS", f"{text}, with at most {most} calls")

    def _on_acknowledges(self, process: str, topic: str, partition: int, offset: int) -> None:
        """Take an acknowledgement: of a record, and without workers by key of those before it that were delivered."""
        arrived = {
            at
            for (worker, *where), offsets in self._arrived.items()
            if where == [topic, partition] and _process_of(worker) == _process_of(process)
            for at in offsets
        }
        offsets = [at for at in arrived if at == offset or (at < offset and not self._by_key)]
        values = {value for at in offsets if (value := self._value_at(topic, partition, at)) is not None}
        self._accepting[process] = values - self._acknowledged
        self._acknowledged |= values

    def _on_not_acknowledged(self, process: str, *_position: Any) -> None:
        self._acknowledged -= self._accepting.pop(process)

    def _on_assign(self, _group: str, *partitions: str) -> None:
        """Count the calls of an assignment anew."""
        for value, record in self.records.items():
            if f"{record.topic}-{record.partition}" in partitions:
                self._calls.pop(value, None)

    def _on_lost(self, _group: str, *partitions: str) -> None:
        """Let workers finish events of partitions that their process has lost: it cannot know who has them now."""
        process = self._world.current
        for value, at_work in self._at_work.items():
            if value in self.records and f"{self.records[value].topic}-{self.records[value].partition}" in partitions:
                for worker in [one for one in at_work if process and _process_of(one) == process.name]:
                    del at_work[worker]

    def _on_child_end(self, worker: str, _code: int) -> None:
        for key in [key for key in self._arrived if key[0] == worker]:
            del self._arrived[key]
        for value in self._called.pop(worker, ()):  # its process may not have the result
            self._calls.pop(value, None)
        for value, at_work in self._at_work.items():
            if at_work.pop(worker, None) is not None:
                self._deaths[value] += 1


def _process_of(worker: str) -> str:
    return worker.rpartition(".")[0] or worker


def visible(brokers: Brokers, topic: str) -> dict[bytes, int]:
    """Return how often a reader at `read_committed` sees each value of a topic."""
    found: dict[bytes, int] = defaultdict(int)
    for log in brokers.topics[topic].partitions:
        records: Any = log.fetch(0, 1_000_000, committed_only=True)
        for record in records.records if records else ():
            if record.value is not None:
                found[record.value] += 1
    return found
