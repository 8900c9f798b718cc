"""Calls and problems that cross between the loop and a consumer's thread."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError
from headrace.kafka.client.access import Right, is_refused
from headrace.kafka.client.error_map import to_error
from headrace.records import CommitOffsets, Epochs, Record, TopicPartition
from headrace.runtime import Clock, Deadline, LoopBridge, Service, SystemClock, blocking

_CLOCK = SystemClock()
log = logging.getLogger(__name__)

T = TypeVar("T")


class Listener(Protocol):
    """Receives the records of a consumer. Every method runs on the loop; three of them do nothing by default."""

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        """Partitions are assigned: partition to assignment epoch, and the group's committed offsets."""

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        """Records arrived, in offset order, never empty; from Kafka as a `RecordBatch`."""
        return

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        """The end of the partition is at `position`: all records before it were passed."""
        return

    def on_gap(self, partition: TopicPartition, offsets: int) -> None:
        """This many offsets are no longer in the log and were skipped, as the policy says."""
        return

    async def on_revoked(self, partitions: Sequence[TopicPartition], deadline: Deadline) -> CommitOffsets:
        """Finish what is in flight for these partitions, and return what to commit for them.

        Returns within the deadline. What is still in flight then is abandoned, and the next owner delivers it.
        """

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Partitions belong to another member already: drop everything, commit nothing."""


class LoopProxy:
    """The loop and the listener, as the consumer's thread sees them.

    If a call fails, the service dies and nothing more is called.
    """

    def __init__(self, service: Service, listener: Listener, epochs: dict[TopicPartition, int]) -> None:
        """Take the running loop; `epochs` are the assignment epochs as far as the loop knows them."""
        self.listener = listener
        self.epochs = epochs
        self._service = service
        self._bridge: LoopBridge[Callable[[], None]] = LoopBridge(asyncio.get_running_loop(), self._run_all)

    @property
    def is_dead(self) -> bool:
        """Whether the service has died."""
        return self._service.death is not None

    def post(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop, after everything posted before; returns at once."""
        self._bridge.post(lambda: call(*arguments))

    def wait_for(self, work: Callable[[], Awaitable[T]], name: str, seconds: float) -> T | None:
        """Return the result of the work; None if it takes longer, has failed, or the service is dead already."""
        if self.is_dead:
            return None
        response: list[T] = []
        done = blocking.Event()

        async def task() -> None:
            try:
                response.append(await work())
            finally:
                done.set()

        self.post(lambda: self._service.spawn(task(), name))
        return response[0] if done.wait(seconds) and response else None

    def _run_all(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            # After a failed call the listener has missed something, so later calls would be wrong.
            if self.is_dead:
                return
            try:
                call()
            except Exception as cause:  # noqa: BLE001 boundary: the service dies and is named, nothing is committed
                self._service.die(cause)


class CommandQueue:
    """Calls that the loop makes on the consumer's thread, and waking the thread while it waits."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self.append = self._calls.append
        self._wake = blocking.Event()
        self.attentive_until = 0.0
        """Until when polls are short, by the monotonic clock; set on the thread."""

    def run(self) -> None:
        """Run the waiting calls; one that is added meanwhile runs after the next poll."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def wake(self) -> None:
        """End the current or the next `wait`."""
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait until `wake`, at most this long."""
        self._wake.wait(seconds)
        self._wake.clear()


class ConsumerProblems:
    """Why records do not arrive: set by the thread, read by the loop. One sentence per partition, one for the group."""

    def __init__(self, group: str, kafka: KafkaConfig = KafkaConfig(), clock: Clock = _CLOCK) -> None:  # noqa: B008 it never changes
        self.group = group
        self.joining_since: float | None = clock.monotonic()
        """Since when the group has assigned nothing, by the monotonic clock; None while it has."""
        self._clock = clock
        self.refused: dict[TopicPartition, float] = {}
        """Partitions that the group may not read, each with the time of the next attempt."""
        self._kafka = kafka
        self.stalled: dict[str, HeadraceError] = {}
        """Problems that only a seek solves, by partition."""
        self.on_stalled: Callable[[HeadraceError], None] = lambda error: None
        """Called on the thread, once per problem."""
        self._problems: dict[str, HeadraceError | str] = {"": f"group {group}: not joined yet"}

    def __contains__(self, about: str) -> bool:
        """Whether a partition has a problem, or the group; a group without partitions has one."""
        return about in self._problems or (not about and self.joining_since is not None)

    def stall(self, about: str, error: HeadraceError) -> None:
        """Set the problem of a partition that waits for a seek."""
        new = self._problems.get(about) != error.description
        self.report(about, error.description)
        self.stalled = {**self.stalled, about: error}
        if new:
            self.on_stalled(error)

    def report(self, about: str, problem: HeadraceError | str, level: int = logging.WARNING) -> None:
        """Set or clear the problem of a partition, or of the group if `about` is empty; an error is a missing right."""
        if about in self.stalled:
            self.stalled = {name: error for name, error in self.stalled.items() if name != about}
        if problem:
            if str(self._problems.get(about)) != str(problem):  # the same problem may be found every second
                log.log(level, "%s", problem)
            self._problems[about] = problem
        else:
            self._problems.pop(about, None)
        if not about:
            self.without_partitions(joining=bool(problem))

    def without_partitions(self, *, joining: bool = True) -> None:
        """Set whether the group waits to be assigned partitions again, from now on or for some time."""
        if not joining:
            self.joining_since = None
        elif self.joining_since is None:
            self.joining_since = self._clock.monotonic()

    def error(self, error: Any, topics: Iterable[str] = ()) -> HeadraceError:
        """Return our error for what Kafka refuses the group, perhaps for some topics."""
        needed = [Right("Read", "group", self.group), *(Right("Read", "topic", topic) for topic in topics)]
        return to_error(error, f"group {self.group}", self._kafka, *needed)

    def explain(self, error: Any, topics: Iterable[str] = (), before: str = "") -> HeadraceError | str:
        """Return the error about a missing right; for any other error of Kafka, a text that begins with `before`."""
        return self.error(error, topics) if is_refused(error) else f"{before}{error.str()}"

    def all(self) -> Sequence[str]:
        return [str(problem) for problem in self._problems.values()]

    def of(self, partition: TopicPartition) -> HeadraceError | str:
        """Return why no records of a partition arrive; empty if there is no problem."""
        names = str(partition), f"topic {partition.topic}", ""
        return next((problem for name in names if (problem := self._problems.get(name))), "")

    def refusal(self, topics: Collection[str]) -> HeadraceError | None:
        """Return the missing right of the group, one of these topics, or a partition of one; None without one."""
        errors = [(about, error) for about, error in list(self._problems.items()) if isinstance(error, HeadraceError)]
        names = {"", *(f"topic {topic}" for topic in topics)}
        return next((error for about, error in errors if about in names or about.rpartition("-")[0] in topics), None)
