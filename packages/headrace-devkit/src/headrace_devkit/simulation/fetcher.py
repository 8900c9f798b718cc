"""What a client fetches: positions of its partitions, one request per leader, and records until they are taken.

Source: librdkafka, `rdkafka_fetcher.c`, `rdkafka_partition.c`, `rdkafka_offset.c`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError

from headrace_devkit.simulation.brokers import Brokers, Later
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.partition_log import Fetched, StoredRecord

Partition = tuple[str, int]
RESET_TO: Final = {
    "error": OFFSET_INVALID,
    "none": OFFSET_INVALID,
    "earliest": OFFSET_BEGINNING,
    "beginning": OFFSET_BEGINNING,
    "smallest": OFFSET_BEGINNING,
    "latest": OFFSET_END,
    "largest": OFFSET_END,
    "end": OFFSET_END,
}
"""Where `auto.offset.reset` continues."""
_RECORDS_OF_A_RESPONSE = 500
_ERROR_SECONDS = 0.5
"""librdkafka's `fetch.error.backoff.ms`."""


class FetchSettings(NamedTuple):
    """The properties of a client that decide how it fetches."""

    wait_seconds: float
    queue_seconds: float
    """How long it waits when its queue is full."""
    most_records: int
    most_bytes: int
    reports_end: bool
    committed_only: bool
    reset: int


class FetchedPartition:
    """A partition that was assigned once: the client remembers it, and its pause."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.is_paused = False
        """By the application."""
        self.is_held = False
        """By the client, while the application handles a rebalance."""
        # This assignment
        self.is_started = False
        self.position: int | None = None
        """The next offset to fetch; None if it is not known."""
        self.begins_at: int | None = None
        """The first offset that was fetched since the last move."""
        self.taken_to: int = OFFSET_INVALID
        """The next offset to return to the application."""
        self.version = 0
        """Grows with each seek, pause and assignment: what was fetched before is dropped."""
        self.moves = 0
        """Grows with each seek and assignment: the response to an earlier one does not count."""
        self.end_reported_at: int | None = None
        self.not_before = 0.0

    @property
    def key(self) -> Partition:
        return self.topic, self.partition

    @property
    def is_fetched(self) -> bool:
        return self.is_started and not self.is_paused and not self.is_held and self.position is not None


class Fetcher:
    """Fetches for one client."""

    def __init__(
        self, cluster: ClientCluster, settings: FetchSettings, deliver: Callable[[FetchedPartition, Any], None]
    ) -> None:
        """Prepare; `deliver` gets a record, or an error with its offset, of the present version of a partition."""
        self.partitions: dict[Partition, FetchedPartition] = {}
        self.queued_records = 0
        self.queued_bytes = 0
        self._cluster = cluster
        self._settings = settings
        self._deliver = deliver
        self._fetching: dict[int, None] = {}
        """Leaders that have a request."""
        self._wakes_at: float | None = None
        self._is_refreshing = False

    @property
    def reset_to(self) -> int:
        """Where a partition without a committed offset begins; invalid if that is an error."""
        return self._settings.reset

    @property
    def committed_only(self) -> bool:
        """Whether it reads what is committed only."""
        return self._settings.committed_only

    def of(self, topic: str, partition: int) -> FetchedPartition:
        """Return the state of a partition, assigned or not."""
        key = topic, partition
        if key not in self.partitions:
            self.partitions[key] = FetchedPartition(*key)
        return self.partitions[key]

    # What the application does ---------------------------------------------------------------------------------------

    def start(self, state: FetchedPartition, offset: int) -> None:
        """Fetch a partition from an offset on, or from its beginning or end."""
        state.is_started = True
        state.taken_to = OFFSET_INVALID
        self._move(state, offset)

    def stop(self, state: FetchedPartition) -> None:
        state.is_started = state.is_held = False
        state.version += 1
        state.moves += 1
        state.position = state.begins_at = None
        state.taken_to = OFFSET_INVALID

    def seek(self, state: FetchedPartition, offset: int) -> None:
        self._move(state, offset)

    def hold(self, state: FetchedPartition, *, by_application: bool) -> None:
        """Pause: what is fetched and not returned is dropped, and fetched again later."""
        if by_application:
            state.is_paused = True
        else:
            state.is_held = True
        state.version += 1
        state.position = state.taken_to if state.taken_to >= 0 else state.begins_at

    def release(self, state: FetchedPartition, *, by_application: bool) -> None:
        """Resume."""
        if by_application:
            was, state.is_paused = state.is_paused, False
        else:
            was, state.is_held = state.is_held, False
        state.version += 1
        if was and state.is_fetched:
            self.serve()

    def taken(self, state: FetchedPartition, record: StoredRecord) -> None:
        """Take note that the application has got a record."""
        state.taken_to = record.offset + 1

    # Requests --------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Send what is due: one request to each leader."""
        if self._cluster.is_closed:
            return
        now = self._cluster.world.now
        is_full = self.queued_records >= self._settings.most_records or self.queued_bytes >= self._settings.most_bytes
        due: dict[int, list[FetchedPartition]] = {}
        for state in self.partitions.values():
            if not state.is_fetched:
                continue
            if state.not_before > now or is_full:
                self._serve_at(max(state.not_before, now + self._settings.queue_seconds if is_full else 0.0))
                continue
            leader = self._cluster.leader(*state.key)
            if leader is None:
                self._refresh()
            elif leader not in self._fetching:
                due.setdefault(leader, []).append(state)
        for leader, states in due.items():
            self._send(leader, states)

    def _send(self, leader: int, states: list[FetchedPartition]) -> None:
        self._fetching[leader] = None
        requested = {state.key: (state, state.version, state.position or 0) for state in states}
        offsets = {key: offset for key, (_, _, offset) in requested.items()}
        settings = self._settings
        brokers = self._cluster.brokers

        def call() -> Later:
            return fetch(brokers, leader, offsets, settings.wait_seconds, committed_only=settings.committed_only)

        def answered(response: Any) -> None:
            self._fetching.pop(leader, None)
            for key, (state, version, offset) in requested.items():
                if state.version == version and state.is_started:
                    self._take(state, offset, response if isinstance(response, KafkaError) else response[key])
            self.serve()

        self._cluster.send(leader, call, answered)

    def _take(self, state: FetchedPartition, offset: int, found: Fetched | KafkaError) -> None:
        if isinstance(found, KafkaError):
            if found.code() == KafkaError.OFFSET_OUT_OF_RANGE:
                self._reset(state, offset)
                return
            state.not_before = self._cluster.world.now + _ERROR_SECONDS
            self._refresh()
            return
        if found.end == offset:
            if self._settings.reports_end and state.end_reported_at != offset:
                state.end_reported_at = offset
                self._deliver(state, (KafkaError(KafkaError._PARTITION_EOF), offset))
            return
        state.position = found.next_offset
        for record in found.records:
            self.queued_records += 1
            self.queued_bytes += record.size_bytes
            self._deliver(state, record)

    def _reset(self, state: FetchedPartition, offset: int) -> None:
        """Do what `auto.offset.reset` says about an offset that the log does not have."""
        state.position = state.begins_at = None
        if self._settings.reset != OFFSET_INVALID:
            self._move(state, self._settings.reset)
            return
        self.fail(state, "fetch failed due to requested offset not available on the broker", offset)

    def fail(self, state: FetchedPartition, text: str, offset: int) -> None:
        """Report a partition that has no offset to fetch, until it is moved."""
        state.is_started = True
        self._deliver(state, (KafkaError(KafkaError._AUTO_OFFSET_RESET, text), offset))

    def _move(self, state: FetchedPartition, offset: int) -> None:
        state.version += 1
        state.moves += 1
        state.end_reported_at = None
        state.not_before = 0.0
        state.position = state.begins_at = offset if offset >= 0 else None
        if offset >= 0:
            self.serve()
        elif offset in (OFFSET_BEGINNING, OFFSET_END):
            self._look_up(state, offset)
        else:
            self._reset(state, offset)

    def _look_up(self, state: FetchedPartition, offset: int) -> None:
        move = state.moves

        def again() -> None:
            if state.moves == move:
                self._look_up(state, offset)

        def found(response: Any) -> None:
            if state.moves != move or not state.is_started:
                return
            if isinstance(response, KafkaError):
                self._refresh()
                self._cluster.after(_ERROR_SECONDS, again)
                return
            state.position = state.begins_at = response
            self.serve()

        self.list_offset(state.key, offset, found)

    def list_offset(self, key: Partition, offset: int, answered: Callable[[Any], object], seconds: float = 60) -> None:
        """Ask the leader for the offset at the beginning, the end, or a time; it waits behind a fetch."""
        leader = self._cluster.leader(*key)
        brokers, committed_only = self._cluster.brokers, self._settings.committed_only
        if leader is None:
            self._refresh()
            self._cluster.after(0, lambda: answered(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)))
            return

        def call() -> int | KafkaError:
            log = brokers.log(*key)
            if log is None or log.leader != leader:
                return KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION if log else KafkaError.UNKNOWN_TOPIC_OR_PART)
            if offset == OFFSET_BEGINNING:
                return log.start
            if offset == OFFSET_END:
                return log.end_for(committed_only=committed_only)
            at = log.offset_at(offset)
            return OFFSET_END if at is None else at

        self._cluster.send(leader, call, answered, seconds=seconds)

    def _refresh(self) -> None:
        """Ask for the leaders again."""
        if not self._is_refreshing:
            self._is_refreshing = True
            topics = dict.fromkeys(state.topic for state in self.partitions.values() if state.is_started)
            self._cluster.refresh(topics, self._refreshed)

    def _refreshed(self, _error: KafkaError | None) -> None:
        self._cluster.after(0.1, self._refresh_over)
        self.serve()

    def _refresh_over(self) -> None:
        self._is_refreshing = False
        if any(one.is_fetched and self._cluster.leader(*one.key) is None for one in self.partitions.values()):
            self._refresh()

    def _serve_at(self, at: float) -> None:
        if self._wakes_at is not None and self._wakes_at <= at:
            return
        self._wakes_at = at

        def wake() -> None:
            if self._wakes_at == at:
                self._wakes_at = None
                self.serve()

        self._cluster.after(at - self._cluster.world.now, wake)


def fetch(
    brokers: Brokers, broker: int, offsets: Mapping[Partition, int], seconds: float, *, committed_only: bool
) -> Later:
    """Respond with what a broker has at these offsets, at once if that is anything, else after this time."""
    later = Later()
    logs = [log for key in offsets if (log := brokers.log(*key))]

    def look(*, is_last: bool = False) -> None:
        if later.is_done:
            return
        found = {key: _read(brokers, broker, key, offset, committed_only) for key, offset in offsets.items()}
        if not is_last and all(
            isinstance(part, Fetched) and part.next_offset == offsets[key] for key, part in found.items()
        ):
            return
        for log in logs:
            log.forget_wait(again)
        later.respond(found)

    def again() -> None:
        look()
        if not later.is_done:
            for log in logs:
                log.forget_wait(again)
                log.when_changed(again)

    again()
    if not later.is_done:
        brokers.world.call_later(seconds, lambda: look(is_last=True), brokers.machine(broker))
    return later


def _read(brokers: Brokers, broker: int, key: Partition, offset: int, committed_only: bool) -> Fetched | KafkaError:
    log = brokers.log(*key)
    if log is None:
        return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    if log.leader != broker:
        return KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)
    found = log.fetch(offset, _RECORDS_OF_A_RESPONSE, committed_only=committed_only)
    return KafkaError(KafkaError.OFFSET_OUT_OF_RANGE) if found is None else found
