"""Where a group member starts to read its partitions, and what is missing where its position is out of range.

The client never resets a position by itself. Everything here is used on the consumer's thread; every request to Kafka
has a time limit.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from headrace.config.membership import ConsumerConfig
from headrace.errors import HeadraceError, InvalidOffset
from headrace.kafka.client import library
from headrace.kafka.commits import from_client
from headrace.kafka.fetch_queue import FetchQueue
from headrace.kafka.loop_proxy import ConsumerProblems
from headrace.records import Committed, Epochs, Offsets, TopicPartition
from headrace.runtime import Clock, Deadline

_LIMIT_SECONDS = 3.0
"""The thread does not poll meanwhile, and other partitions wait for it."""
_LOG_SECONDS = 1.0
"""For the offsets of one log: its leader may be down."""
_ROUND_SECONDS = 3.0
"""For the logs of all partitions in one round of requests."""
_RETRY_SECONDS = 1.0

StoredOffsets = Callable[[str, TopicPartition, int], Awaitable[int | None]]
"""Returns the offset that a backend keeps for a group, a partition and an assignment epoch; None if it has none.
Raises HeadraceError if there is no response."""
RequestStored = Callable[[Epochs], None]
"""Requests stored offsets in these epochs and returns at once. `answered` or `failed` takes the response."""


class ReadPolicy(NamedTuple):
    """How a group reads: where it starts, what it does about missing offsets, how it takes part in the group."""

    reset: Literal["earliest", "latest", "none"] = "earliest"
    """Where a group without committed offset starts; with `none` the partition waits for a seek."""
    on_gap: Literal["stop", "continue"] = "stop"
    """Whether a partition whose next records were removed is paused, or resumes at the start of the log."""
    as_one: bool = False
    """Whether a topic that is added to those of a group with committed offsets is read from its start. So it is with
    patterns, because such a topic was created later."""
    member: ConsumerConfig = ConsumerConfig()
    """Session, assignment and fetches."""
    stored_offsets: StoredOffsets | None = None
    """Returns where the group resumes, if Kafka does not keep its offsets."""
    replaces_client: bool = True
    """Whether the client leaves and joins again with changed certificates. A lease would be lost by that."""
    transactional: bool = False
    """Whether offsets are committed in transactions, which need the metadata of the member at any time."""
    drain_seconds: float = 20.0
    """How long a revoked partition waits for its records in flight."""
    max_processing_seconds: float = 0.0
    """A partition in which no record completes for this long is paused until one does; 0 for no limit."""
    advice: str = "resume at an offset that is there (headrace reactive seek), or set on_gap: continue"
    """What to do about a position that is not in the log, for errors."""


class StartPosition(NamedTuple):
    """Where to start in a partition."""

    offset: int
    """An offset, or the client's number for the beginning."""
    committed: Committed | None = None
    """The offset that the group has committed, or commits now."""
    is_new: bool = False
    """Whether it must be committed now: "latest" is a moment, so the offset is committed when it is chosen."""
    epoch: int = 0
    """Number of the assignment."""


class OffsetGap(NamedTuple):
    """Offsets that a group should read next but that are not in the log."""

    first: int
    end: int
    """One more than the last."""
    start: int
    """Where the log starts."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the log ends before the group's position, instead of starting after it."""
        return self.end != self.start

    def __str__(self) -> str:
        why = "the log ends there, before the group's position" if self.is_cut_off else "removed before they were read"
        return f"offsets {self.first} to {self.end - 1} ({self.end - self.first}) are no longer in the log: {why}"


class _StoreRequest(NamedTuple):
    """A request to the backend that keeps a group's offsets, or its response."""

    epoch: int
    retry_at: float
    """When to send it again, by the monotonic clock."""
    is_answered: bool = False
    offset: int | None = None


@dataclasses.dataclass(slots=True)
class _Unknown:
    """The state of a partition whose position is not known."""

    position: int | None = None
    """The position that is out of range; None if there is none yet."""
    stored: _StoreRequest | None = None
    starts_at_end: bool = False
    """Whether it starts at its end, which is not known yet. By then another partition may have a committed offset, and
    this one would count as added."""


class Assignment:
    """The client's assignment, under either protocol of rebalancing: some partitions at a time, or all at once.

    Source: KIP-429; the client refuses incremental changes under the eager protocol, and whole ones under the other.
    """

    def __init__(self, queue: FetchQueue, *, whole: bool) -> None:
        """Prepare; `whole` for the eager protocol, where each change names all partitions."""
        self._queue = queue
        self._client = queue.client
        self._whole = whole
        self._started_at: dict[TopicPartition, int] = {}

    def add(self, assigned: list[Any]) -> None:
        """Fetch from partitions, at the offsets they carry."""
        (self._client.assign if self._whole else self._client.incremental_assign)(assigned)
        self._queue.assigned(assigned)
        self._started_at |= {TopicPartition(p.topic, p.partition): p.offset for p in assigned}

    def remove(self, revoked: list[Any]) -> None:
        """Fetch no longer from partitions; under the eager protocol these are always all."""
        if self._whole:
            self._client.unassign()
        else:
            self._client.incremental_unassign(revoked)
        for item in revoked:
            self._started_at.pop(TopicPartition(item.topic, item.partition), None)

    def reassign_at(self, partition: TopicPartition, offset: int) -> list[TopicPartition]:
        """Fetch a partition from another offset. Returns the partitions that must be paused or resumed again.

        The client refuses a seek where it has stopped fetching; it never refuses another assignment.
        """
        moved = [library.TopicPartition(*partition, offset)]
        self._started_at[partition] = offset
        if not self._whole:
            self._client.incremental_unassign(moved)
            self._client.incremental_assign(moved)
            self._queue.assigned(moved)
            return [partition]
        others = [item for item in self.positions() if (item.topic, item.partition) != partition]
        self._client.assign(moved + others)
        self._queue.assigned(moved + others)
        return list(self._started_at)

    def positions(self) -> list[Any]:
        """Return the assigned partitions with the offsets to fetch next."""
        items = self._client.position([library.TopicPartition(*p) for p in self._started_at])
        for item in items:
            if item.offset < 0:  # no record was returned yet
                item.offset = self._started_at[TopicPartition(item.topic, item.partition)]
        return list(items)


class PositionResolver:
    """Resolves the positions of assigned partitions: asks until Kafka, or the backend with the offsets, answers.

    Until then these partitions are paused. A partition with a seek is one of them until its new offset is committed.
    """

    def __init__(self, policy: ReadPolicy, clock: Clock, problems: ConsumerProblems) -> None:
        """Prepare; `problems` gets the problems of partitions."""
        # Settings
        self.policy = policy
        self._clock = clock
        self._problems = problems
        self.request_stored: RequestStored | None = None
        """Set if a backend keeps the group's offsets."""
        # The group
        self.subscribed: Sequence[str] = ()
        """Topics the group reads."""
        self._topics_read: set[str] = set()
        self._last_epoch = 0
        # This assignment
        self._positions: dict[TopicPartition, int] = {}
        """The next offset to read, of partitions that are read."""
        self._unknown: dict[TopicPartition, _Unknown] = {}
        """Partitions to resolve, the next one first."""
        self._sought: dict[TopicPartition, StartPosition] = {}
        """Partitions that start at another position, as soon as that is committed."""
        self._retry_at = 0.0
        """When the next round of requests is due, by the monotonic clock."""

    def new_epoch(self) -> int:
        """Return a number for an assignment, larger than any earlier one; of other processes too, if clocks agree."""
        self._last_epoch = max(self._last_epoch + 1, int(self._clock.time() * 1000))
        return self._last_epoch

    def starts(self, client: Any, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, StartPosition]:
        """Return where to start, with a new epoch; partitions without a response stay unresolved."""
        started_at = self._clock.monotonic()
        for partition in partitions:
            self._unknown.setdefault(partition, _Unknown()).position = None
        ready = self._with_stored_offset(partitions) if self.request_stored else partitions
        responses: Mapping[TopicPartition, Any] = {}
        try:
            if ready:
                responses = self._find_starts(client, ready)
        except library.KafkaException as cause:
            responses = dict.fromkeys(ready, cause.args[0])
        found: dict[TopicPartition, StartPosition] = {}
        level = logging.WARNING
        for partition, start in responses.items():
            if not isinstance(start, StartPosition):
                self._resolve_last(partition)
                if start.code() == library.KafkaError._NO_OFFSET:
                    self._problems.stall(str(partition), self._no_offset(partition))
                else:
                    before = f"{partition}: reading its start position failed: "
                    explained = self._problems.explain(start, [partition.topic], before)
                    self._problems.report(str(partition), explained, level)
                    level = logging.DEBUG  # the coordinator has the same response for all of them
                continue
            self._problems.report(str(partition), "")
            self._topics_read.add(partition.topic)
            stored = self._unknown.pop(partition).stored or _StoreRequest(self.new_epoch(), 0)
            found[partition] = start._replace(epoch=stored.epoch)
            if stored.offset is not None and (start.committed is None or start.committed.offset != stored.offset):
                offset = stored.offset
                found[partition] = StartPosition(offset, Committed(offset), is_new=True, epoch=stored.epoch)
        self._pause_requests(started_at)
        return found

    def _no_offset(self, partition: TopicPartition) -> HeadraceError:
        text = f"the group has committed no offset, and auto.offset.reset is none: {self.policy.advice}"
        return InvalidOffset(f"{partition}: {text}", **partition._asdict())

    def advance(self, partition: TopicPartition, position: int) -> bool:
        """Keep the next offset to read; False if records before it must be ignored, as the position is open."""
        if self.is_open(partition):
            return False
        self._positions[partition] = position
        return True

    def read_to(self, positions: Offsets) -> None:
        """Keep the next offsets to read in this assignment."""
        self._positions.update(positions)

    def position_of(self, partition: TopicPartition) -> int:
        """Return the next offset to read of a partition whose position is known."""
        return self._positions.get(partition, library.OFFSET_BEGINNING)

    def out_of_range(self, partition: TopicPartition, position: int | None) -> None:
        """Keep a position whose record is not in the log or cannot be read.

        The client gives no position if the log was truncated (KIP-320). For a batch that cannot be read it gives the
        first offset, and a part of that batch may have been passed to the listener.
        """
        known = self.position_of(partition)
        self._unknown[partition] = _Unknown(known if position is None else max(position, known))

    def is_open(self, partition: TopicPartition) -> bool:
        """Return whether the position is not resolved yet, or not committed yet."""
        return partition in self._unknown or partition in self._sought

    def wait_for_commit(self, partition: TopicPartition, start: StartPosition) -> None:
        """Start at another position, as soon as that is committed in its epoch."""
        self._sought[partition] = start

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop partitions that are no longer assigned."""
        for partition in partitions:
            self._unknown.pop(partition, None)
            self._sought.pop(partition, None)
            self._positions.pop(partition, None)
            self._problems.report(str(partition), "")

    def resolve(
        self, client: Any, is_committing: Callable[[TopicPartition], bool]
    ) -> Iterator[tuple[TopicPartition, StartPosition | OffsetGap | int]]:
        """Yield partitions that are resolved now: where to start, what is missing, or the position to resume at."""
        for partition, start in list(self._sought.items()):
            if self._sought.get(partition) is start and not is_committing(partition):  # not forgotten or sought again
                del self._sought[partition]
                yield partition, start
        if not self._unknown or self._clock.monotonic() < self._retry_at:
            return
        started_at = self._clock.monotonic()
        yield from self.starts(client, [p for p, known in self._unknown.items() if known.position is None]).items()
        limit = Deadline(self._clock, _ROUND_SECONDS)
        for partition, position in [(p, known.position) for p, known in self._unknown.items()]:
            if position is not None and not limit.passed:
                try:
                    gap = find_gap(client, partition, position)
                except library.KafkaException as cause:
                    self._resolve_last(partition)
                    before = f"{partition}: offset {position} is out of range: "
                    self._problems.report(
                        str(partition), self._problems.explain(cause.args[0], [partition.topic], before)
                    )
                    continue
                del self._unknown[partition]
                self._problems.report(str(partition), "")
                yield partition, position if gap is None else gap
        self._pause_requests(started_at)

    def _find_starts(
        self, client: Any, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, StartPosition | library.KafkaError]:
        """Return where to start: at the committed offset, else at the start or the end as the policy says.

        What was added to the topics of the group starts at its beginning, whatever the policy says; otherwise its first
        records would be skipped. That is a new partition, a recreated topic and, if the policy allows it, a new topic.
        A start that is not known is an error.

        Raises:
            KafkaException: The group's coordinator did not answer.
        """
        limit = Deadline(self._clock, _ROUND_SECONDS)
        starts: dict[TopicPartition, Any] = {}
        read_before: dict[str, bool] = dict.fromkeys(self._topics_read, True)
        for partition, committed in committed_offsets(client, partitions).items():
            topic = partition.topic
            if isinstance(committed, library.KafkaError):
                starts[partition] = committed
                continue
            if not committed and self.policy.reset == "latest" and topic not in read_before:
                read_before[topic] = has_committed(client, {topic, *(self.subscribed if self.policy.as_one else ())})
            if committed:
                starts[partition] = StartPosition(committed.offset, committed)
            elif self.policy.reset == "none":
                starts[partition] = library.KafkaError(library.KafkaError._NO_OFFSET)
            elif self.policy.reset == "earliest" or (read_before[topic] and not self._unknown[partition].starts_at_end):
                starts[partition] = StartPosition(library.OFFSET_BEGINNING)
            else:
                self._unknown[partition].starts_at_end = True
        ends = [partition for partition in partitions if partition not in starts]
        for partition, end in log_ends(client, ends, limit).items():
            starts[partition] = StartPosition(end, Committed(end), is_new=True) if isinstance(end, int) else end
        return starts

    def _pause_requests(self, started_at: float) -> None:
        """Send no requests for as long as the last round took, so that the thread polls."""
        now = self._clock.monotonic()
        self._retry_at = now + max(_RETRY_SECONDS, now - started_at)

    def _resolve_last(self, partition: TopicPartition) -> None:
        """Resolve the other partitions first: each without a response takes from the time of the others."""
        self._unknown[partition] = self._unknown.pop(partition)

    def answered(self, partition: TopicPartition, epoch: int, offset: int | None) -> None:
        """Take a stored offset that was requested in this epoch."""
        if self._is_unanswered(partition, epoch):
            self._unknown[partition].stored = _StoreRequest(epoch, math.inf, is_answered=True, offset=offset)
            self._retry_at = 0.0

    def failed(self, partition: TopicPartition, epoch: int, why: str) -> None:
        """Send the request again after a pause: the backend did not answer."""
        if self._is_unanswered(partition, epoch):
            self._unknown[partition].stored = _StoreRequest(0, self._clock.monotonic() + _RETRY_SECONDS)
            self._problems.report(
                str(partition), f"{partition}: requesting its offset from the backend failed, will retry: {why}"
            )

    def _is_unanswered(self, partition: TopicPartition, epoch: int) -> bool:
        known = self._unknown.get(partition)
        return bool(known and known.stored and known.stored.epoch == epoch and not known.stored.is_answered)

    def _with_stored_offset(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions whose stored offset is known, and request those of the others."""
        assert self.request_stored is not None
        now = self._clock.monotonic()
        epochs: dict[TopicPartition, int] = {}
        answered: list[TopicPartition] = []
        for partition in partitions:
            known = self._unknown[partition]
            if known.stored is None or known.stored.retry_at <= now:
                epochs[partition] = self.new_epoch()
                known.stored = _StoreRequest(epochs[partition], math.inf)
            elif known.stored.is_answered:
                answered.append(partition)
        if epochs:
            self.request_stored(epochs)
        return answered


def committed_offsets(client: Any, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Any]:
    """Return what the group has committed: a `Committed`, None without an offset, a KafkaError if it is not known.

    Raises:
        KafkaException: The group's coordinator did not answer.
    """
    items = client.committed([library.TopicPartition(*partition) for partition in partitions], timeout=_LIMIT_SECONDS)
    errors = {TopicPartition(item.topic, item.partition): item.error for item in items if item.error}
    found = {partition: known if known.offset >= 0 else None for partition, known in from_client(items).items()}
    return {**found, **errors}


def has_committed(client: Any, topics: Collection[str]) -> bool:
    """Return whether the group has committed an offset of one of these topics.

    Raises:
        KafkaException: Kafka did not answer for one of their partitions.
    """
    known = client.list_topics(timeout=_LIMIT_SECONDS).topics
    partitions = [TopicPartition(topic, n) for topic in topics if topic in known for n in known[topic].partitions]
    found = committed_offsets(client, partitions).values() if partitions else ()
    for error in found:
        if isinstance(error, library.KafkaError):
            raise library.KafkaException(error)
    return any(found)


def log_ends(client: Any, partitions: Sequence[TopicPartition], limit: Deadline) -> dict[TopicPartition, Any]:
    """Return the ends of logs, a KafkaError where one is not known. What is not requested in time is left out.

    One request per leader is for all of its partitions, because each waits until the fetch before it ends, mostly half
    a second. It fails as a whole if one leader is down; then each partition has a request of its own.
    """
    requested = [library.TopicPartition(*partition, library.OFFSET_END) for partition in partitions]
    ends: dict[TopicPartition, Any] = {}
    with contextlib.suppress(library.KafkaException):
        for item in client.offsets_for_times(requested, timeout=_LOG_SECONDS) if requested else ():
            if item.error or item.offset >= 0:
                ends[TopicPartition(item.topic, item.partition)] = item.error or item.offset
        return ends
    for item, partition in zip(requested, partitions, strict=True):
        if limit.passed:
            break
        try:
            _, ends[partition] = client.get_watermark_offsets(item, timeout=_LOG_SECONDS)
        except library.KafkaException as cause:
            ends[partition] = cause.args[0]
    return ends


def find_gap(client: Any, partition: TopicPartition, position: int) -> OffsetGap | None:
    """Return what is missing at a position that is out of range, or None if it is in range by now.

    Raises:
        KafkaException: Kafka did not answer.
    """
    start, end = client.get_watermark_offsets(library.TopicPartition(*partition), timeout=_LOG_SECONDS)
    if 0 <= position < start:
        return OffsetGap(position, start, start)
    return OffsetGap(end, position, start) if position > end else None


def client_partitions(partitions: Iterable[TopicPartition]) -> list[Any]:
    """Return partitions as the client has them."""
    return [library.TopicPartition(*partition) for partition in partitions]
