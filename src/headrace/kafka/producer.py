"""One idempotent producer with its delivery thread.

Requests go in on the loop, many records each; delivery reports run on the thread and fill the request's results; a
finished request crosses back to the loop, many requests per wake-up. There is one future per request, none per record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import confluent_kafka

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.admin import Admin
from headrace.kafka.client.access import is_refused, principal_of, refusal_in
from headrace.kafka.client.credentials import ClientReplacement
from headrace.kafka.client.error_map import ClientErrors, report_error, write_error
from headrace.kafka.client.properties import client_log, producer_properties
from headrace.kafka.producer_limits import SEVERAL, ByteBudget, key_of_request
from headrace.kafka.sent_request import Callbacks, Done, ProduceResult, Request, Results
from headrace.records import OutgoingRecord, Produced
from headrace.runtime import Deadline, LoopBridge, OwnedThread, Readiness, Service, next_slice

_POLL_SECONDS = 0.1
_FLUSH_SECONDS = 0.02
_RECORD_OVERHEAD_BYTES = 64
_THREAD_STOP_SECONDS = 5.0
_REPLACE_SECONDS = 5.0
_CROWD_REQUESTS, _CROWD_RECORDS = 4, 500
"""More of them fill batches, so the client need not send at once."""
_SLICE_RECORDS, _KEPT_CALLBACKS, _MOST_KEPT_RECORDS = 250, 8, 2000
_CROWD_SECONDS = 0.05
_REFUSED_SECONDS, _IDLE_REFUSED_SECONDS = 1.0, 30.0
"""A client without any right to write is replaced after so long, with requests or without."""
_LEAST_BATCH_BYTES = 4096
"""Topics that allow less share one client, whose batches have one record each."""
_BACKOFF_MS = 5


class _Health:
    """What is known of one client."""

    def __init__(self, logged: str = "") -> None:
        self.fatal = False
        """Whether it must be replaced."""
        self.has_written = False
        self.refusal: confluent_kafka.KafkaError | None = None
        """Kafka's answer to a client that may write to no topic: it never sends a record."""
        self.logged = logged
        """The last sentence about that."""


class Producer(Service):
    """Writes records with `acks=all` and idempotence, within a byte budget.

    Topics that allow less than a usual batch have a client of their own for each size, with smaller batches.
    When Kafka refuses a batch, each record of it is written once more, in its turn, in a batch of one record. So only
    a record that fails alone has failed.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        settings: ProducerConfig,
        name: str = "producer",
        admin: Admin | None = None,
        *,
        refuses: bool = False,
    ) -> None:
        """Prepare. Without `admin` no limits of topics are known; one that `refuses` takes nothing during an outage."""
        super().__init__(name)
        self._admin = admin or Admin(kafka)
        self._refuses = refuses
        self._settings = settings
        self._sizes: dict[str, int] = {}
        self._limited: dict[int, Producer] = {}
        self._budget = ByteBudget(settings.max_pending_bytes, settings.partition_share)
        self._idle = asyncio.Event()
        self._work = threading.Event()
        self._open_requests = 0
        self._callbacks: list[Callbacks] = []  # of requests that have ended
        self._crowded_at = -1.0
        self._health = _Health()
        self._replacement = ClientReplacement(kafka.security, self._new_client)
        self._client = self._new_client()
        self._bridge: LoopBridge[Request] | None = None
        self._thread: OwnedThread | None = None

    def readiness(self) -> Readiness:
        return Readiness(True, self._health.logged if self._health.refusal else "")

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted and not yet acknowledged."""
        return self._budget.pending_bytes

    async def start(self) -> None:
        self._open()
        self.publish("headrace_producer_pending_bytes", lambda: self._budget.pending_bytes, producer=self.name)

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._bridge = LoopBridge(loop, self._finish)
        self._replacement.open(self.name, loop, self._use, self._work.set)
        self._thread = OwnedThread(self.name, self._serve_reports, self.die)
        self._thread.start()

    async def produce(
        self, records: Sequence[OutgoingRecord], sliced: bool = False, *, in_order: bool = False
    ) -> Results:
        """Write records and wait for every acknowledgement.

        If cancelled, the records may still be written. With `sliced` the loop serves others between slices, and
        records of other requests may stand between these. With `in_order` the last records of each key stand in their
        order, also when a batch of them is refused: so a record of another batch may be written twice.

        Returns:
            One result per record, in their order.

        Raises:
            ProducerQueueFull: A byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        sizes: dict[int, list[int]] = {}
        for topic in dict.fromkeys([record.topic for record in records]):
            if not self._admin.batch_limits.knows(topic):
                await self._admin.batch_limits.learn(topic)
            self._client_of(topic)
        for index, record in enumerate(records) if self._sizes else ():
            sizes.setdefault(self._sizes.get(record.topic, 0), []).append(index)
        if len(sizes) < 2:
            return await (self._produce_slices(records) if sliced else self._begin(records, in_order))
        return await self._produce_parts(records, list(sizes.values()), in_order)

    async def _produce_parts(
        self, records: Sequence[OutgoingRecord], parts: list[list[int]], in_order: bool
    ) -> Results:
        """Write records with several clients; a part that does not fit fails alone once another was sent."""
        begun: list[tuple[list[int], asyncio.Future[Results]]] = []
        found: dict[int, ProduceResult] = {}
        for indexes in parts:
            try:
                begun.append((indexes, self._begin([records[index] for index in indexes], in_order)))
            except (errors.ProducerQueueFull, errors.KafkaUnavailable) as full:
                if not begun:
                    raise
                found.update(dict.fromkeys(indexes, full))
        for indexes, part in begun:
            found.update(zip(indexes, await part, strict=True))
        return [found[index] for index in range(len(records))]

    async def _produce_slices(self, records: Sequence[OutgoingRecord]) -> Results:
        answer: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        client, index = self._client_of(records[0].topic), 0
        request = client._take(records, lambda results: None if answer.done() else answer.set_result(results), 0, None)
        try:
            for index in range(0, len(records), _SLICE_RECORDS):
                await next_slice(started=True)
                client._hand_over(request, records[index : index + _SLICE_RECORDS], index)
        except asyncio.CancelledError:
            for rest in range(index, len(records)):
                request.refuse(rest, errors.KafkaUnavailable("the request was cancelled before this record was sent"))
            raise
        return await answer

    def _begin(self, records: Sequence[OutgoingRecord], in_order: bool) -> asyncio.Future[Results]:
        answer: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        done: Done = lambda results: None if answer.done() else answer.set_result(results)  # noqa: E731
        self.send(records, done, in_order=in_order)
        return answer

    def send(
        self,
        records: Sequence[OutgoingRecord],
        done: Done,
        partitions: int = 0,
        size_bytes: int | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        """Write records without waiting.

        Args:
            done: Called once on the loop, with one result per record; must not raise.
            partitions: How many the records' topic has, if that is known.
            size_bytes: What the records count for; by default counted here.
            in_order: As for `produce`.

        Raises:
            ProducerQueueFull: A byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        if not records:
            asyncio.get_running_loop().call_soon(done, [])  # in a context of its own, as always
            return
        client = self._client_of(records[0].topic)
        if client is not self:
            client.send(records, done, partitions, size_bytes, in_order=in_order)
            return
        request = self._take(records, done, partitions, size_bytes)
        request.in_order = in_order
        self._hand_over(request, records)

    def _take(self, records: Sequence[OutgoingRecord], done: Done, partitions: int, size_bytes: int | None) -> Request:
        """Count records that the client gets next, and return their request."""
        assert self._bridge is not None
        if self._refuses:
            self._admin.reachability.check(self._settings.unreachable_seconds)
        if size_bytes is None:
            size_bytes = sum([r.size_bytes if r.headers else len(r.key or b"") + len(r.value or b"") for r in records])
        size = size_bytes + _RECORD_OVERHEAD_BYTES * len(records)
        key = key_of_request(records, partitions)
        self._budget.take(key, size)
        topics = {record.topic for record in records} if len(records) > 1 else ()
        self._budget.count(topics, 1)
        post, acked = self._bridge.post, self._settings.acks != 0
        request = Request(len(records), size, key, post, done, acked, self._failure, topics)
        request.callbacks = self._callbacks.pop() if self._callbacks else Callbacks()
        request.callbacks.request = request
        request.records = records
        self._idle.clear()
        self._open_requests += 1
        return request

    def _wake(self, records: int) -> None:
        if self._open_requests > _CROWD_REQUESTS or records > _CROWD_RECORDS:
            self._crowded_at = time.monotonic()
        if not self._work.is_set():
            self._work.set()

    def check_capacity(self, topic: str, size_bytes: int) -> None:
        """Raise ProducerQueueFull unless a request to several partitions of a topic fits, before it is encoded."""
        self._budget.check((topic, SEVERAL), size_bytes)

    async def drain(self, deadline: Deadline) -> None:
        if self._open_requests:
            await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)
        for client in list(self._limited.values()):
            await client.drain(deadline)

    async def stop(self) -> None:
        if self._thread:
            for held in self._replacement.stop():
                self._hand_over(*held)
            # What is still queued ends as a report of its own (purged: unknown if in flight), so callers get answers.
            self._client.purge()
            await self._thread.stop(_THREAD_STOP_SECONDS)
        for client in list(self._limited.values()):
            await client.stop()
        await super().stop()

    def _client_of(self, topic: str) -> Producer:
        """Return the producer of a topic; another one is refused while records are in flight, for their order."""
        size = self._admin.batch_limits.of(topic, self._settings.batch_bytes) or 0
        if 0 < size < _LEAST_BATCH_BYTES:
            size = 1
        if size != self._sizes.get(topic, 0):
            if self._budget.holds(topic):
                raise errors.ProducerQueueFull(
                    f"topic {topic} has another limit for batches than before (max.message.bytes), and records are "
                    "in flight: nothing of this request was sent, send it again after a pause"
                )
            self._sizes[topic] = size
        return self._with_batches_of(size) if size else self

    def _with_batches_of(self, size: int) -> Producer:
        if size not in self._limited:
            settings = self._settings.model_copy(update={"batch_bytes": size})
            client = _SmallBatches(
                self._admin.config, settings, f"{self.name}_{size}", self._admin, refuses=self._refuses
            )
            client._budget = self._budget
            client.on_death = lambda dead: self.die(dead.death or RuntimeError(dead.name))
            client._open()
            self._limited[size] = client
        return self._limited[size]

    def _hand_over(self, request: Request, records: Sequence[OutgoingRecord], first: int = 0) -> None:
        if self._replacement.held is not None:
            self._replacement.held.append((request, records, first))
            return
        produce: Any = self._client.produce  # its stubs forget that a list of headers is invariant
        callbacks = request.callbacks.between(first, first + len(records))
        for index, (record, callback) in enumerate(zip(records, callbacks, strict=True), first):
            try:
                to = -1 if record.partition is None else record.partition
                produce(record.topic, record.value, record.key, to, callback, None, record.timestamp_ms, record.headers)
            except BufferError:
                full = errors.ProducerQueueFull("the client's queue is full: send this record again after a pause")
                request.refuse(index, full)
            except confluent_kafka.KafkaException as cause:
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
        self._wake(len(records))

    def _finish(self, requests: list[Request]) -> None:
        for request in requests:
            done, request.done = request.done, None
            if done:
                self._open_requests -= 1
                self._budget.give_back(request.key, request.size_bytes)
                self._budget.count(request.topics, -1)
                if len(self._callbacks) < _KEPT_CALLBACKS and request.total <= _MOST_KEPT_RECORDS:
                    self._callbacks.append(request.callbacks)
                if request.is_suspected and self._settings.batch_bytes > 1:
                    self._write_alone(request, done)
                else:
                    done(request.results)
                request.records = ()  # its callbacks know it until the next request
        if type(requests[-1].results[0]) is Produced and self._settings.acks != 0:
            self._health.has_written = True
            self._admin.reachability.answered()
        if not self._open_requests:
            self._idle.set()

    def _write_alone(self, request: Request, done: Done) -> None:
        """Write the records again whose batch was refused, each in a batch of one record."""
        results, suspects = request.results, request.suspects()

        def take(found: Sequence[ProduceResult]) -> None:
            for index, result in zip(suspects, found, strict=True):
                results[index] = result
            done(results)

        try:
            if not self._thread or self._thread.stop_requested.is_set():
                raise errors.KafkaUnavailable("a record of the same batch was refused, and the process ends")
            self._with_batches_of(1).send([request.records[index] for index in suspects], take)
        except (errors.ProducerQueueFull, errors.KafkaUnavailable) as cause:
            take([cause] * len(suspects))
        except Exception as cause:  # noqa: BLE001 boundary: no further client can be made, and the request must end
            text = f"a record of the same batch was refused, and a client for single records cannot be made: {cause!r}"
            take([errors.KafkaUnavailable(text)] * len(suspects))

    def _serve_reports(self, stop_requested: threading.Event) -> None:
        while not stop_requested.is_set():
            with contextlib.suppress(SystemError):  # a fatal error that a report has taken
                try:
                    with ClientErrors():
                        self._poll()
                except confluent_kafka.KafkaException as cause:
                    self._note_error(cause.args[0])
            if self._health.refusal:
                self._wait_for_rights(stop_requested)
            if self._health.fatal:
                self._replace_client()
        with contextlib.suppress(SystemError, confluent_kafka.KafkaException), ClientErrors():
            self._client.flush(_THREAD_STOP_SECONDS / 2)

    def _poll(self) -> None:
        client = self._client
        if not self._replacement.advance(client) and time.monotonic() - self._crowded_at < _CROWD_SECONDS:
            client.poll(_POLL_SECONDS)
        elif len(client):
            # The client sends at once while it is flushed: a lone request does not wait for company that would
            # not come, and requests in numbers still share their batches.
            client.flush(_FLUSH_SECONDS)
        else:
            self._work.clear()
            # Race: a record that arrives before the flag is cleared is seen here, a later one sets it.
            if not len(client):
                self._work.wait(_POLL_SECONDS)
            client.poll(0)

    def _wait_for_rights(self, stop_requested: threading.Event) -> None:
        """Wait until another client may get the right to write: a moment, or longer while no request is open."""
        stop_requested.wait(_REFUSED_SECONDS)
        self._work.clear()
        end = time.monotonic() + _IDLE_REFUSED_SECONDS
        while not (self._open_requests or stop_requested.is_set() or time.monotonic() > end or self._work.wait(0.1)):
            pass

    def _use(self, client: confluent_kafka.Producer, held: Sequence[tuple[Request, Sequence[Any], int]]) -> None:
        """Continue with a new client; on the loop."""
        self._client = client
        for request, records, first in held:
            self._hand_over(request, records, first)

    def _replace_client(self) -> None:
        # Librdkafka's fatal errors are for good. What the old client holds ends with reports that mean "unknown".
        old, self._client = self._client, self._new_client()
        old.purge()
        with contextlib.suppress(SystemError, confluent_kafka.KafkaException), ClientErrors():
            old.flush(_REPLACE_SECONDS)
        self._health = _Health(self._health.logged)

    def _note_error(self, error: confluent_kafka.KafkaError) -> None:
        self._admin.reachability.failed(error)
        health = self._health
        if error.fatal() and is_refused(error) and not health.has_written:
            health.fatal, health.refusal = True, error
            principal = principal_of(self._admin.config)[0]
            problem = f"{principal} has no right Write on any topic, so every record is refused until it has one"
            if problem != health.logged:
                client_log.warning("producer %s: %s", self.name, problem)
            health.logged = problem
        elif error.fatal():
            client_log.error("producer %s is replaced after a fatal error: %s", self.name, error.str())
            health.fatal = True

    def _failure(self, error: confluent_kafka.KafkaError, record: confluent_kafka.Message) -> errors.HeadraceError:
        try:
            error.code()
        except SystemError as fatal:  # the client raises its fatal error in the first call of this report
            if isinstance(fatal.__cause__, confluent_kafka.KafkaException):
                self._note_error(fatal.__cause__.args[0])
        topic = str(record.topic())
        if self._health.refusal:  # so this record was never sent
            return write_error(self._health.refusal, self._admin.config, topic)
        if refused := self._admin.batch_limits.refusal(error, record, self._settings.batch_bytes):
            return refused
        return report_error(error, topic, self._admin.config)

    def _new_client(self) -> confluent_kafka.Producer:
        client_id = f"headrace-{self.name}-{next(_client_numbers)}"
        properties = producer_properties(self._admin.config, self._settings, client_id)
        if self._settings.batch_bytes == 1:
            properties["retry.backoff.ms"] = _BACKOFF_MS  # a refused record repeats what is in flight behind it
        return confluent_kafka.Producer({**properties, "error_cb": self._note_error})


class _SmallBatches(Producer):
    """A client with batches of one size; what waits here counts in the budget of the producer it is part of."""

    def _client_of(self, topic: str) -> Producer:
        return self


_client_numbers = itertools.count(1)
