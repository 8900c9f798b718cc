"""The scenario of a replay: a range of a topic is delivered again, to the backend or to another topic.

While the job runs, its processes are killed and paused, and it is paused itself. In the end it is done: each record of
the range was delivered again, none outside of it, a kill has repeated few, and the group's offsets are as before.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.job_run import GROUP, PARTITIONS, TOPIC, JobChoices, JobRun
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction
from headrace_devkit.simulation.world import Machine, World

COPIES = "orders.copies"
_RETRY_SECONDS = 0.5


class ReplayRange(NamedTuple):
    """What a seed decides of the range."""

    is_to_topic: bool
    partition: int | None
    """None for all partitions, from their first record to their last."""
    first: int
    last: int
    failing: float
    """Share of the deliveries that the backend does not answer well."""
    held: int
    """How often the job is paused and resumed."""

    @classmethod
    def of(cls, chance: random.Random, records: int) -> "ReplayRange":
        first, last = sorted(chance.sample(range(records // PARTITIONS), 2))
        return cls(
            chance.random() < 0.4,
            chance.choice((None, 0, 1)),
            first,
            last,
            chance.choice((0.0, 0.1)),
            chance.choice((0, 0, 2)),
        )

    def has(self, partition: int, offset: int) -> bool:
        """Whether a record is in the range."""
        return self.partition is None or (partition == self.partition and self.first <= offset <= self.last)


class ReplayRun(JobRun):
    """A replay of records that the backend has taken before."""

    def __init__(self, world: World, choices: JobChoices, span: ReplayRange) -> None:
        super().__init__(world, choices, COPIES)
        self._span = span
        self._taken: Counter[tuple[int, int]] = Counter()
        self._faults = 0
        world.watch("arrived", self._on_arrived)
        world.watch("taken", self._on_taken)
        world.watch("commit", self._on_commit)
        for name in ("kill", "pause", "broker"):
            world.watch(name, self._on_fault)

    @property
    def total(self) -> int:
        return sum(self._span.has(number % PARTITIONS, number // PARTITIONS) for number in range(self.choices.records))

    def decide(self, process: Machine, records: Sequence[Arrived]) -> BackendAction:
        if self.has_begun and self.world.random.random() < self._span.failing:
            return BackendAction(0.005, status=503)
        return BackendAction(0.005)

    def is_pushed(self) -> bool:
        committed = self.kafka.groups.offsets.committed(GROUP)
        ends = {
            partition: log.end for partition in range(PARTITIONS) if (log := self.kafka.brokers.log(TOPIC, partition))
        }
        return all((at := committed.get((TOPIC, one))) and at.offset == end for one, end in ends.items())

    def request(self) -> tuple[str, dict[str, Any]]:
        span = self._span
        where = {} if span.partition is None else {"partition": span.partition, "first": span.first, "last": span.last}
        to = {"topic": COPIES} if span.is_to_topic else {"consumer": GROUP}
        client = self.kafka.machine("operator")
        client.loop.start(self._hold(), lambda task: None)
        return "/adm/replays", {"topic": TOPIC, "to": to, "rate": self.choices.rate, **where}

    async def _hold(self) -> None:
        """Pause the job, and resume it, in turns."""
        for action in ("pause", "resume") * self._span.held:
            await asyncio.sleep(self.world.random.uniform(0.5, 4.0))
            while self.job.get("state") not in ("done", "failed", "stopped"):
                path = f"/adm/jobs/{self.job['id']}/{action}" if self.job else ""
                status, response = await self.send("POST", path) if path else (0, None)
                if status == 200 or (status == 409 and self.job):  # it has just finished
                    break
                if status not in (0, 404, 429, 503, 504):
                    self.world.problem("STATUS", f"{action}: {status} {response}")
                await asyncio.sleep(_RETRY_SECONDS)

    # What happens

    def _on_arrived(self, process: str, topic: str, partition: int, offset: int, _attempt: int) -> None:
        if self.has_begun and (self._span.is_to_topic or not self._span.has(partition, offset)):
            self.world.problem("OUTSIDE", f"{process} delivered {topic}-{partition} {offset}")

    def _on_taken(self, _process: str, _topic: str, partition: int, offset: int, _status: int) -> None:
        if self.has_begun:
            self._taken[partition, offset] += 1

    def _on_commit(self, group: str, topic: str, partition: int, offset: int, member: str, error: int) -> None:
        log = self.kafka.brokers.log(topic, partition)
        if self.has_begun and group == GROUP and topic == TOPIC and not error and log and offset != log.end:
            self.world.problem("OFFSETS", f"{member} commits {offset} of {topic}-{partition}, which was at {log.end}")

    def _on_fault(self, *_values: Any) -> None:
        self._faults += self.has_begun

    def check(self) -> None:
        """Check that each record of the range was delivered, no other one, and few of them twice."""
        if self._span.is_to_topic:
            copies = self.counts(COPIES)
            self._taken = Counter({divmod(number, PARTITIONS)[::-1]: count for number, count in copies.items()})
        for partition, offset in self._taken:
            if not self._span.has(partition, offset):
                self.world.problem("OUTSIDE", f"{TOPIC}-{partition} {offset} was replayed")
        for number in range(self.choices.records):
            offset, partition = divmod(number, PARTITIONS)
            if self._span.has(partition, offset) and not self._taken[partition, offset]:
                self.world.problem("LOST", f"{TOPIC}-{partition} {offset} was not replayed")
        most = max(self._taken.values(), default=0)
        if most > 1 + self._faults:
            self.world.problem("REPEATED", f"a record was replayed {most} times, after {self._faults} faults")


def replaying(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    choices = JobChoices.of(world.random)
    span = ReplayRange.of(world.random, choices.records)
    world.note("options", json.dumps([choices, span]))
    ReplayRun(world, choices, span).go()
    return [choices, span]
