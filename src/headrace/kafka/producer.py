"""One idempotent producer with its delivery thread.

Requests go in on the loop, many records each; delivery reports run on the thread and fill the request's results; a
finished request crosses back to the loop, many requests per wake-up. There is one future per request, none per record.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.budget import SEVERAL, ByteBudget, Lane, lane_of
from headrace.kafka.error_map import repeat_error, report_error, to_error
from headrace.kafka.producer_settings import producer_properties
from headrace.kafka.properties import client_log
from headrace.kafka.reachability import Reachability
from headrace.lifecycle import Deadline, LoopBridge, OwnedThread, Service
from headrace.lifecycle.gauge_registry import register_gauge, unregister_gauge
from headrace.records import NO_OFFSET, OutgoingRecord, Produced

_POLL_SECONDS = 0.1
_FLUSH_SECONDS = 0.02
_RECORD_OVERHEAD_BYTES = 64
_THREAD_STOP_SECONDS = 5.0
_REPLACE_SECONDS = 5.0
_CROWD_REQUESTS = 4
_CROWD_SECONDS = 0.05

ProduceResult = Produced | errors.HeadraceError
"""Where a record was written, or why not. `KafkaTimeout` and `FatalKafkaError` mean: unknown."""
Results = list[ProduceResult]
"""One per record, in their order."""


class _Request:
    """The records of one `send`: their results and how many are still out."""

    __slots__ = ("_acked", "_post", "delivered", "done", "lane", "refused", "results", "size_bytes", "total")

    def __init__(
        self,
        total: int,
        size_bytes: int,
        lane: Lane,
        post: Callable[[_Request], None],
        done: Callable[[Results], None],
        acked: bool = True,
    ) -> None:
        self.total = total
        self.size_bytes = size_bytes
        self.lane = lane
        self.results: list[Any] = [None] * total
        self.delivered = 0  # written by the delivery thread only
        self.refused = 0  # written by the loop only
        self.done: Callable[[Results], None] | None = done
        self._acked = acked
        self._post = post

    def reported(self, index: int, error: confluent_kafka.KafkaError | None, record: Any) -> None:
        """Take one delivery report, on the delivery thread."""
        if error is None:
            offset = record.offset()
            if offset is None:
                self.results[index] = repeat_error(record) if self._acked else Produced(record.partition(), NO_OFFSET)
            else:
                self.results[index] = Produced(record.partition(), offset)
        else:
            self.results[index] = report_error(error, f"produce to {record.topic()}", keyed=record.key() is not None)
        self.delivered += 1
        # Each side counts its own and then reads the other's; whoever comes last sees the sum. If both see it, the
        # request is posted twice, and the second time it is done already.
        if self.delivered + self.refused == self.total:
            self._post(self)

    def refuse(self, index: int, error: errors.HeadraceError) -> None:
        """Note that the client did not take a record, on the loop."""
        self.results[index] = error
        self.refused += 1
        if self.delivered + self.refused == self.total:
            self._post(self)


class Producer(Service):
    """Writes records with `acks=all` and idempotence, within a byte budget."""

    def __init__(
        self,
        kafka: KafkaConfig,
        settings: ProducerConfig,
        name: str = "producer",
        reachability: Reachability | None = None,
        *,
        refuses: bool = False,
    ) -> None:
        """Prepare; no one is contacted.

        Args:
            kafka: Where.
            settings: How.
            name: Name of the service.
            reachability: Gets the errors and the acknowledgements of this client.
            refuses: Whether nothing is taken while no broker has answered for `settings.unreachable_seconds`.
        """
        super().__init__(name)
        self._reachability = reachability
        self._refuses = refuses
        self._kafka = kafka
        self._settings = settings
        self._budget = ByteBudget(settings.max_pending_bytes, settings.partition_share)
        self._idle = asyncio.Event()
        self._work = threading.Event()
        self._open_requests = 0
        self._crowded_at = -1.0
        self._fatal = False
        self._client = self._new_client()
        self._bridge: LoopBridge[_Request] | None = None
        self._thread: OwnedThread | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted and not yet acknowledged."""
        return self._budget.pending_bytes

    async def start(self) -> None:
        self._bridge = LoopBridge(asyncio.get_running_loop(), self._finish)
        self._thread = OwnedThread(self.name, self._serve_reports, self.die)
        self._thread.start()
        register_gauge("headrace_producer_pending_bytes", lambda: self._budget.pending_bytes, producer=self.name)

    async def produce(self, records: Sequence[OutgoingRecord]) -> Results:
        """Write records and wait for every acknowledgement.

        If cancelled, the records may still be written.

        Returns:
            One result per record, in their order.

        Raises:
            ProducerQueueFull: A byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        answer: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self.send(records, lambda results: None if answer.done() else answer.set_result(results))
        return await answer

    def send(
        self,
        records: Sequence[OutgoingRecord],
        done: Callable[[Results], None],
        partitions: int = 0,
        size_bytes: int | None = None,
    ) -> None:
        """Write records without waiting.

        Args:
            records: What to write.
            done: Called once on the loop, with one result per record; must not raise.
            partitions: How many the records' topic has, if that is known.
            size_bytes: What the records count for; by default counted here.

        Raises:
            ProducerQueueFull: A byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        if not records:
            asyncio.get_running_loop().call_soon(done, [])  # in a context of its own, as always
            return
        assert self._bridge is not None
        if self._reachability and self._refuses:
            self._reachability.check(self._settings.unreachable_seconds)
        if size_bytes is None:
            size_bytes = sum([record.size_bytes for record in records])
        size = size_bytes + _RECORD_OVERHEAD_BYTES * len(records)
        lane = lane_of(records, partitions)
        self._budget.take(lane, size)
        request = _Request(len(records), size, lane, self._bridge.post, done, self._settings.acks != 0)
        self._idle.clear()
        self._open_requests += 1
        self._hand_over(request, records)
        if self._open_requests > _CROWD_REQUESTS:
            self._crowded_at = time.monotonic()
        if not self._work.is_set():
            self._work.set()

    def check_room(self, topic: str, size_bytes: int) -> None:
        """Return if there is room for a request to several partitions of a topic, before anybody works for it.

        Raises:
            ProducerQueueFull: There is none.
        """
        self._budget.check((topic, SEVERAL), size_bytes)

    async def drain(self, deadline: Deadline) -> None:
        if self._budget.pending_bytes:
            await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)

    async def stop(self) -> None:
        unregister_gauge("headrace_producer_pending_bytes", producer=self.name)
        if self._thread:
            # What is still queued ends as a report of its own (purged: unknown if in flight), so callers get answers.
            self._client.purge()
            await self._thread.stop(_THREAD_STOP_SECONDS)
        await super().stop()

    def _hand_over(self, request: _Request, records: Sequence[OutgoingRecord]) -> None:
        produce, reported = self._client.produce, request.reported
        for index, record in enumerate(records):
            try:
                produce(
                    record.topic,
                    record.value,
                    record.key,
                    -1 if record.partition is None else record.partition,
                    functools.partial(reported, index),
                    None,
                    record.timestamp_ms,
                    record.headers,  # type: ignore[arg-type]  # the client's stubs forget that a list is invariant
                )
            except BufferError:
                full = errors.ProducerQueueFull("the client's queue is full: send this record again after a pause")
                request.refuse(index, full)
            except confluent_kafka.KafkaException as cause:
                error = to_error(cause, f"produce to {record.topic}")
                if isinstance(error, errors.FatalKafkaError):
                    self._fatal = True
                    # The client refused before taking the record, so it is certainly not written.
                    error = errors.KafkaUnavailable("the Kafka client is being replaced: send this record again")
                request.refuse(index, error)

    def _finish(self, requests: list[_Request]) -> None:
        for request in requests:
            done, request.done = request.done, None
            if done:
                self._open_requests -= 1
                self._budget.give_back(request.lane, request.size_bytes)
                done(request.results)
        if self._reachability and type(requests[-1].results[0]) is Produced and self._settings.acks != 0:
            self._reachability.answered()
        if not self._budget.pending_bytes:
            self._idle.set()

    def _serve_reports(self, stop_asked: threading.Event) -> None:
        while not stop_asked.is_set():
            client = self._client
            if time.monotonic() - self._crowded_at < _CROWD_SECONDS:
                client.poll(_POLL_SECONDS)
            elif len(client):
                # The client sends at once while it is flushed: a lone request does not wait for company that would
                # not come, and requests in numbers still share their batches.
                client.flush(_FLUSH_SECONDS)
            else:
                self._work.clear()
                # Race: a record that came before the flag was cleared is seen here, one that comes later sets it.
                if not len(client):
                    self._work.wait(_POLL_SECONDS)
                client.poll(0)
            if self._fatal:
                self._replace_client()
        self._client.flush(_THREAD_STOP_SECONDS / 2)

    def _replace_client(self) -> None:
        # Librdkafka's fatal errors are for good. New requests go to the new client at once; what the old one holds
        # ends with reports that mean "unknown".
        old, self._client = self._client, self._new_client()
        self._fatal = False
        old.purge()
        old.flush(_REPLACE_SECONDS)

    def _note_error(self, error: confluent_kafka.KafkaError) -> None:
        if self._reachability:
            self._reachability.failed(error)
        if error.fatal():
            client_log.error("producer %s is replaced after a fatal error: %s", self.name, error.str())
            self._fatal = True

    def _new_client(self) -> confluent_kafka.Producer:
        client_id = f"headrace-{self.name}-{next(_client_numbers)}"
        properties = producer_properties(self._kafka, self._settings, client_id)
        return confluent_kafka.Producer({**properties, "error_cb": self._note_error})


_client_numbers = itertools.count(1)
