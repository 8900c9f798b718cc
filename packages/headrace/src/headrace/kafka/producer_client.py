"""One client of a producer: the requests in it, and the thread that takes its delivery reports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Final, NamedTuple

from headrace import errors
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.admin import Admin
from headrace.kafka.client import library
from headrace.kafka.client.access import is_refused, principal_of, refusal_in
from headrace.kafka.client.credentials import ClientReplacement
from headrace.kafka.client.error_map import ClientErrors, repeat_error, report_error, write_error
from headrace.kafka.client.properties import client_log, producer_properties
from headrace.records import NO_OFFSET, OutgoingRecord, Produced
from headrace.runtime import OwnedThread, blocking, clock

ProduceResult = Produced | errors.HeadraceError
"""Where a record was written, or why not. `KafkaTimeout` and `FatalKafkaError` mean: unknown."""
Results = list[ProduceResult]
"""One per record, in their order."""
Done = Callable[[Results], None]
_OF_A_BATCH = errors.RecordRefused, errors.RecordTooLarge
"""What Kafka reports for all records of a batch when it refuses one of them."""
_POLL_SECONDS = 0.1
_FLUSH_SECONDS = 0.02
_THREAD_STOP_SECONDS = 5.0
_REPLACE_SECONDS = 5.0
_CROWD_SECONDS = 0.05
_LOOP_POLL_SECONDS = 0.001
_MOST_ON_LOOP = 4000
"""Most records whose reports may run on the loop: they take some milliseconds."""
_REFUSED_SECONDS, _IDLE_REFUSED_SECONDS = 1.0, 30.0
"""Seconds until a client without any right to write is replaced: with records that wait, and without."""
_BACKOFF_MS = 5
_client_numbers = itertools.count(1)
TopicPartitionKey = tuple[str, int]
"""A topic, and the partition of all records of a request; `SEVERAL` if there are more or the client chooses."""
SEVERAL: Final = -1


class Claim(NamedTuple):
    """The bytes of one request, counted in a budget."""

    key: TopicPartitionKey
    size_bytes: int


class Request:
    """The records of one `send`: their results, and how many still wait for a report."""

    def __init__(
        self,
        records: Sequence[OutgoingRecord],
        claim: Claim,
        post: Callable[[Request], None],
        done: Done,
        result: Callable[[Any, Any], ProduceResult],
    ) -> None:
        """Prepare; `post` gets the request with all results, `result` translates a report without an offset."""
        # For good
        self.records = records
        self.claim = claim
        self.in_order = False
        self.is_alone = False  # whether each record has a batch of its own
        self.callbacks: Callbacks | None = None  # those of its records, if there are several
        self.done: Done | None = done
        self._post = post
        self._result = result
        # What is known so far
        self.results: list[Any] = [None] * len(records)
        self.is_suspected = False  # whether Kafka refused a batch, and not certainly each record of it
        self.delivered = 0  # written by the delivery thread only
        self.refused = 0  # written by the loop only

    def callbacks_of(self, first: int, end: int) -> Sequence[Callable[[Any, Any], None]]:
        """Return the callbacks of the records from index `first` to before `end`."""
        return self.callbacks.between(first, end) if self.callbacks else (self._reported_alone,)

    def _reported_alone(self, error: library.KafkaError | None, record: Any) -> None:
        self.reported(0, error, record)

    def reported(self, index: int, error: library.KafkaError | None, record: Any) -> None:
        """Take one delivery report, on the delivery thread."""
        offset = None
        if error is None:
            try:
                offset = record.offset()
            except SystemError:  # the client raises a fatal error in the first call of this report
                offset = record.offset()
        if offset is None:
            self.results[index] = result = self._result(error, record)
            self.is_suspected |= isinstance(result, _OF_A_BATCH)
        else:
            self.results[index] = Produced(record.partition(), offset)
        self.delivered += 1
        # Each side counts its own and then reads the other's; the later one sees the sum. If both see it, the
        # request is posted twice, and the second time it is done already.
        if self.delivered + self.refused == len(self.results):
            self._post(self)

    def suspects(self) -> list[int]:
        """Return which records must be written again, each alone, to find those that Kafka refuses.

        With `in_order` also later records of their keys, although they are acknowledged.
        """
        found, keys = list[int](), set[tuple[str, bytes]]()
        for index, (record, result) in enumerate(zip(self.records, self.results, strict=True)):
            key = (record.topic, record.key or b"")
            if isinstance(result, _OF_A_BATCH) or (key in keys and type(result) is Produced):
                found.append(index)
                if self.in_order and record.key is not None:
                    keys.add(key)
        return found

    def refuse(self, index: int, error: errors.HeadraceError) -> None:
        """Record that the client did not take a record, on the loop."""
        self.results[index] = error
        self.refused += 1
        if self.delivered + self.refused == len(self.results):
            self._post(self)


class Callbacks:
    """Delivery callbacks by index, for one request after the other: creating them costs half as much as `produce`."""

    request: Request

    def __init__(self) -> None:
        self._made: list[Callable[[Any, Any], None]] = []

    def between(self, first: int, end: int) -> list[Callable[[Any, Any], None]]:
        """Return those of the records from index `first` to before `end`."""
        self._made += [functools.partial(self._report, index) for index in range(len(self._made), end)]
        return self._made[first:end]

    def _report(self, index: int, error: Any, record: Any) -> None:
        self.request.reported(index, error, record)


class _Health:
    """The state of one client."""

    def __init__(self) -> None:
        self.fatal = False
        """Whether it must be replaced."""
        self.has_written = False
        self.refusal: library.KafkaError | None = None
        """Kafka's response to a client that may write to no topic: it never sends a record."""


class _LoopPolling:
    """Has reports taken on the loop while requests come in numbers. The thread reads `is_active`, and nothing else."""

    def __init__(
        self, poll: Callable[[], bool], wake_thread: Callable[[], None], on_death: Callable[[BaseException], None]
    ) -> None:
        """Prepare; `poll` takes reports and returns whether more are due, `wake_thread` has the thread take them."""
        # For good
        self._loop = asyncio.get_running_loop()
        self._poll = poll
        self._wake_thread = wake_thread
        self._on_death = on_death
        # While requests come in numbers
        self.is_active = False
        self.many_at = -1.0
        """When they last did, by the monotonic clock."""

    def begin(self) -> None:
        """Take reports on the loop from now on."""
        self.is_active = True
        self._later()

    def _later(self) -> None:
        # In a context of its own, as each report.
        self._loop.call_later(_LOOP_POLL_SECONDS, self._turn, context=Context())

    def _turn(self) -> None:
        try:
            if clock.monotonic() - self.many_at < _CROWD_SECONDS and self._poll():
                self._later()
                return
        except Exception as cause:  # noqa: BLE001 boundary: the owner gets it, as from the thread
            self._on_death(cause)
        self.is_active = False
        self._wake_thread()


class ProducerClient:
    """Hands records to a client on the loop, and takes their reports on its thread.

    The client is replaced after a fatal error, and when files of `kafka.security` have changed.
    """

    def __init__(self, name: str, admin: Admin, settings: ProducerConfig) -> None:
        # Settings
        self._name = name
        self._admin = admin
        self._settings = settings
        # For good
        self._work = blocking.Event()
        self._replacement = ClientReplacement(admin.config.security, self._new_client)
        self._thread: OwnedThread | None = None
        self._on_loop: _LoopPolling | None = None
        """None until the start."""
        self._logged = ""
        """The last sentence about a client that may not write."""
        # For one client
        self._health = _Health()
        self._client = self._new_client()
        # For a moment
        self._crowded_at = -1.0

    @property
    def problem(self) -> str:
        """What the client may not do; empty if it may write."""
        return self._logged if self._health.refusal else ""

    @property
    def is_running(self) -> bool:
        """Whether its thread takes reports."""
        return self._thread is not None and not self._thread.stop_requested.is_set()

    def start(self, on_death: Callable[[BaseException], None], collect: Callable[[Callable[[], object]], None]) -> None:
        """Start the thread; `on_death` is called on the loop if it ends with an error.

        `collect` runs a call on the loop that takes reports, and finishes the requests that these complete.
        """
        self._on_loop = _LoopPolling(functools.partial(self._poll_on_loop, collect), self._work.set, on_death)
        self._replacement.open(self._name, asyncio.get_running_loop(), self._use, self._work.set)
        self._thread = OwnedThread(self._name, self._serve_reports, on_death)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread. Each queued record gets a report: unknown if in flight, else not written."""
        if self._thread:
            for waiting in self._replacement.stop():
                self._hand_over(*waiting)
            self._client.purge()
            self._thread.stop_requested.set()
            self._work.set()  # after the request, so that the thread does not wait again
            await self._thread.stop(_THREAD_STOP_SECONDS)

    def take(
        self, request: Request, records: Sequence[OutgoingRecord], first: int = 0, *, crowded: bool, many: bool
    ) -> None:
        """Write the records of a request from index `first` on. If it is `crowded`, they fill batches and may wait.

        A single request is sent at once: no other one would fill its batch. Of `many` requests, the reports are taken
        on the loop. There they wait up to a millisecond, but the thread does not take the interpreter for each.
        """
        self._hand_over(request, records, first)
        on_loop = self._on_loop
        if crowded:
            self._crowded_at = now = clock.monotonic()
            if many and on_loop:
                on_loop.many_at = now
                if not on_loop.is_active and len(self._client) <= _MOST_ON_LOOP and not self._health.fatal:
                    on_loop.begin()
        if not ((on_loop and on_loop.is_active) or self._work.is_set()):
            self._work.set()

    def _hand_over(self, request: Request, records: Sequence[OutgoingRecord], first: int = 0) -> None:
        """Give the client the records of a request from index `first` on; refuse those that it does not take."""
        if self._replacement.waiting is not None:
            self._replacement.waiting.append((request, records, first))
            return
        produce: Any = self._client.produce  # its stubs forget that a list of headers is invariant
        callbacks = request.callbacks_of(first, first + len(records))
        for index, (record, callback) in enumerate(zip(records, callbacks, strict=True), first):
            try:
                to = -1 if record.partition is None else record.partition
                produce(record.topic, record.value, record.key, to, callback, None, record.timestamp_ms, record.headers)
            except BufferError:
                full = errors.ProducerQueueFull("the client's queue is full: send this record again after a pause")
                request.refuse(index, full)
            except library.KafkaException as cause:
                refusal = self._health.refusal or refusal_in(cause.args[0])
                error = write_error(refusal or cause, self._admin.config, record.topic)
                if isinstance(error, errors.FatalKafkaError):
                    self._health.fatal = True
                    # The client refused before taking the record, so it is certainly not written.
                    error = errors.KafkaUnavailable("the Kafka client is being replaced: send this record again")
                request.refuse(index, error)
            except Exception as defect:  # noqa: BLE001 boundary: the record was not taken, and its request must end
                why = f"produce to {record.topic}: the client did not take the record: {defect!r}"
                request.refuse(index, errors.RecordRefused(why))

    def written(self) -> None:
        """Record that the client has written a record, so it has the right to."""
        self._health.has_written = True

    def result(self, error: library.KafkaError | None, record: Any) -> ProduceResult:
        """Return the result for a report without an offset; on the thread."""
        if error is None:
            return repeat_error(record) if self._settings.acks != 0 else Produced(record.partition(), NO_OFFSET)
        try:
            error.code()
        except SystemError as fatal:  # the client raises its fatal error in the first call of this report
            if isinstance(fatal.__cause__, library.KafkaException):
                self._note_error(fatal.__cause__.args[0])
        topic = str(record.topic())
        if self._health.refusal:  # so this record was never sent
            return write_error(self._health.refusal, self._admin.config, topic)
        return report_error(error, topic, self._admin.config)

    def _serve_reports(self, stop_requested: blocking.Event) -> None:
        while not stop_requested.is_set():
            with contextlib.suppress(SystemError):  # a fatal error that a report has taken
                try:
                    with ClientErrors():
                        self._poll()
                except library.KafkaException as cause:
                    self._note_error(cause.args[0])
            if self._health.refusal:
                self._wait_for_rights(stop_requested)
            if self._health.fatal:
                self._replace_client()
        with contextlib.suppress(SystemError, library.KafkaException), ClientErrors():
            self._client.flush(_THREAD_STOP_SECONDS / 2)

    def _poll_on_loop(self, collect: Callable[[Callable[[], object]], None]) -> bool:
        """Take reports; return whether the loop takes the next ones too."""
        client = self._client
        if not self.is_running or len(client) > _MOST_ON_LOOP:
            return False
        try:
            with contextlib.suppress(SystemError), ClientErrors():  # as on the thread
                collect(functools.partial(client.poll, 0))
        except library.KafkaException as cause:
            self._note_error(cause.args[0])
            return False
        return not self._health.fatal

    def _poll(self) -> None:
        client = self._client
        on_loop = self._on_loop
        assert on_loop
        if not self._replacement.advance(client) and clock.monotonic() - self._crowded_at < _CROWD_SECONDS:
            if on_loop.is_active:
                self._work.clear()
                # Race: the loop changes the flag, then sets the event. If that was cleared here, the flag is new.
                if on_loop.is_active:
                    self._work.wait(_POLL_SECONDS)
            else:
                client.poll(_POLL_SECONDS)
        elif len(client):
            # The client sends at once while it is flushed; requests in numbers still share their batches.
            client.flush(_FLUSH_SECONDS)
        else:
            self._work.clear()
            # Race: a record that arrives before the flag is cleared is seen here, a later one sets it.
            if not len(client):
                self._work.wait(_POLL_SECONDS)
            if len(client):
                client.flush(_FLUSH_SECONDS)
            else:
                client.poll(0)

    def _wait_for_rights(self, stop_requested: blocking.Event) -> None:
        """Wait until another client may get the right to write: a moment, or longer while no record waits."""
        stop_requested.wait(_REFUSED_SECONDS)
        self._work.clear()
        end = clock.monotonic() + _IDLE_REFUSED_SECONDS
        while not (
            len(self._client) or self._replacement.waiting or stop_requested.is_set() or clock.monotonic() > end
        ):
            if self._work.wait(_POLL_SECONDS):
                break

    def _use(self, client: library.Producer, waiting: Sequence[tuple[Request, Sequence[Any], int]]) -> None:
        """Continue with a new client; on the loop."""
        self._client = client
        for request, records, first in waiting:
            self._hand_over(request, records, first)

    def _replace_client(self) -> None:
        # Fatal errors of librdkafka are final. The records of the old client get reports that mean "unknown".
        old, self._client = self._client, self._new_client()
        old.purge()
        with contextlib.suppress(SystemError, library.KafkaException), ClientErrors():
            old.flush(_REPLACE_SECONDS)
        self._health = _Health()

    def _note_error(self, error: library.KafkaError) -> None:
        self._admin.reachability.failed(error)
        health = self._health
        if error.fatal() and is_refused(error) and not health.has_written:
            health.fatal, health.refusal = True, error
            principal = principal_of(self._admin.config)[0]
            problem = f"{principal} has no right Write on any topic, so every record is refused until it has one"
            if problem != self._logged:
                client_log.warning("producer %s: %s", self._name, problem)
            self._logged = problem
        elif error.fatal():
            client_log.error("producer %s is replaced after a fatal error: %s", self._name, error.str())
            health.fatal = True

    def _new_client(self) -> library.Producer:
        client_id = f"headrace-{self._name}-{next(_client_numbers)}"
        properties = producer_properties(self._admin.config, self._settings, client_id)
        if self._settings.batch_bytes == 1:
            properties["retry.backoff.ms"] = _BACKOFF_MS  # a refused record repeats what is in flight behind it
        return library.Producer({**properties, "error_cb": self._note_error})
