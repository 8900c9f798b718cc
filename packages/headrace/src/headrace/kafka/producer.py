"""One idempotent producer.

Requests go in on the loop, many records each. Delivery reports fill a request's results, and a request whose results
are all known ends on the loop. There is one call per request, none per record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.admin import Admin
from headrace.kafka.client import library
from headrace.kafka.producer_client import ProducerClient
from headrace.kafka.write_request import SEVERAL, Claim, Done, ProduceResult, Results, TopicPartitionKey, WriteRequest
from headrace.records import OutgoingRecord, Produced, WrittenRecords
from headrace.runtime import Deadline, LoopBridge, Readiness, Service, clock, next_slice

_RECORD_OVERHEAD_BYTES = 64
_FEW_REQUESTS, _FEW_RECORDS, _CROWD_SECONDS = 4, 500, 0.05
"""More of them fill batches, so for a moment none needs to be sent at once."""
_SLICE_RECORDS = 250


class ByteBudget:
    """Bytes accepted and not yet acknowledged, in all and per partition: one lost leader does not stop the rest.

    A partition may use a share of the free bytes, not of the whole. So some bytes stay free for other partitions,
    however many leaders are down. With a share of a quarter, one partition uses a fifth of the budget at most.
    """

    def __init__(self, max_bytes: int, share: float) -> None:
        self.pending_bytes = 0
        self._max_bytes = max_bytes
        self._share = share
        self._bytes_by_key: dict[TopicPartitionKey, int] = {}

    def check(self, key: TopicPartitionKey, size: int) -> int:
        """Return the pending bytes of a key; raise ProducerQueueFull unless a request fits."""
        pending = self.pending_bytes
        of_key = self._bytes_by_key.get(key, 0)
        free = self._max_bytes - pending
        # A request larger than the limit passes when nothing else is pending, or it could never be sent.
        if pending and size > free:
            raise _full("", pending, f"{self._max_bytes} bytes (producer.max_pending_bytes)")
        if of_key and of_key + size > free * self._share:
            where = f" for partition {key[1]} of topic {key[0]}" if key[1] != SEVERAL else f" for topic {key[0]}"
            raise _full(where, of_key, f"{self._share:g} of the free part of producer.max_pending_bytes")
        return of_key

    def take(self, key: TopicPartitionKey, size: int) -> Claim:
        """Count a request that passes `check`."""
        self._bytes_by_key[key] = self.check(key, size) + size
        self.pending_bytes += size
        return Claim(key, size)

    def release(self, claim: Claim) -> None:
        """Stop counting a request."""
        key, size = claim.key, claim.size_bytes
        self.pending_bytes -= size
        left = self._bytes_by_key.pop(key) - size
        if left:
            self._bytes_by_key[key] = left


def key_of_request(records: Sequence[OutgoingRecord], partitions: int) -> TopicPartitionKey:
    """Return the partition that a request counts for.

    A request counts as a whole, because looking at each record is expensive. A request to several partitions counts
    for the topic, as one whose partition the client chooses: such requests can starve each other only.

    Args:
        records: One or more, of one topic; otherwise the first one's topic counts.
        partitions: How many the topic has; 0 if that is not known.
    """
    first = records[0]
    if len(records) == 1 and first.partition is None and first.key is not None and partitions:
        return first.topic, library.murmur2(first.key, partitions)  # as the client's own partitioner
    if first.partition is None or any(record.partition != first.partition for record in records):
        return first.topic, SEVERAL
    return first.topic, first.partition


def _full(where: str, pending: int, limit: str) -> errors.ProducerQueueFull:
    return errors.ProducerQueueFull(
        f"this request would exceed the limit of {limit}: {pending} bytes{where} are awaiting Kafka's acknowledgement; "
        "nothing of this request was sent, send it again after a pause",
        pending_bytes=pending,
    )


class Producer(Service):
    """Writes records with `acks=all` and idempotence, within a byte budget.

    When Kafka refuses a batch, each record of it is written once more, alone in a batch, by a second client. So
    only a record that fails alone has failed.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        settings: ProducerConfig,
        name: str = "producer",
        admin: Admin | None = None,
        *,
        refuses: bool = False,
        partition_share: float = 0.25,
    ) -> None:
        """Prepare; one that `refuses` takes nothing while no broker answers.

        One partition may use `partition_share` of the free part of `max_pending_bytes`.
        """
        super().__init__(name)
        # Settings
        self._admin = admin or Admin(kafka)
        self._refuses = refuses
        self._settings = settings
        # Clients
        self._client: ProducerClient | None = None
        """None until the start."""
        self._alone: ProducerClient | None = None
        """Writes one record per batch; created when a batch is refused for the first time."""
        self._bridge: LoopBridge[WriteRequest] | None = None
        # Requests in flight
        self._budget = ByteBudget(settings.max_pending_bytes, partition_share)
        self._open_requests = 0
        self._crowded_at = -1.0
        self._idle = asyncio.Event()

    def readiness(self) -> Readiness:
        return Readiness(True, self._client.problem if self._client else "")

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted and not yet acknowledged."""
        return self._budget.pending_bytes

    async def start(self) -> None:
        self._bridge = LoopBridge(asyncio.get_running_loop(), self._finish)
        self._client = self._open_client(self.name, self._settings)
        self.publish("headrace_producer_pending_bytes", lambda: self._budget.pending_bytes, producer=self.name)

    async def produce(
        self, records: Sequence[OutgoingRecord], sliced: bool = False, *, in_order: bool = False
    ) -> Results:
        """Write records and wait for every acknowledgement.

        If cancelled, the records may still be written. With `sliced` the loop serves others between slices, and
        records of other requests may be between these. With `in_order` the last records of each key are in their
        order, also when a batch of them is refused. For that, a record of another batch may be written twice.

        Returns:
            One result per record, in their order.

        Raises:
            ProducerQueueFull: A byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        response: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        done: Done = lambda results: None if response.done() else response.set_result(results)  # noqa: E731
        self.send(records, done, in_order=in_order, sliced=sliced)
        return await response

    def _open_client(self, name: str, settings: ProducerConfig) -> ProducerClient:
        assert self._bridge
        client = ProducerClient(name, self._admin, settings, self._bridge, self.die)
        client.start()
        return client

    async def _take_slices(
        self, client: ProducerClient, request: WriteRequest, records: Sequence[OutgoingRecord]
    ) -> None:
        index = 0
        try:
            for index in range(0, len(records), _SLICE_RECORDS):
                await next_slice(started=True)
                client.take(request, records[index : index + _SLICE_RECORDS], index)
        except asyncio.CancelledError:
            for rest in range(index, len(records)):
                request.refuse(rest, errors.KafkaUnavailable("the request was cancelled before this record was sent"))
            raise

    def send(
        self,
        records: Sequence[OutgoingRecord],
        done: Done,
        partitions: int = 0,
        size_bytes: int | None = None,
        *,
        in_order: bool = False,
        sliced: bool = False,
    ) -> None:
        """Write records without waiting.

        Args:
            done: Called once on the loop, with one result per record; must not raise.
            partitions: How many the records' topic has, if that is known.
            size_bytes: What the records count for; by default counted here.
            in_order: As for `produce`.
            sliced: As for `produce`.

        Raises:
            ProducerQueueFull: A byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        if not records:
            asyncio.get_running_loop().call_soon(done, [])  # in a separate context, as always
            return
        client = self._client
        assert client, "the producer has not started"
        if self._refuses:
            self._admin.reachability.check(self._settings.unreachable_seconds)
        if size_bytes is None:
            size_bytes = sum([r.size_bytes if r.headers else len(r.key or b"") + len(r.value or b"") for r in records])
        size = size_bytes + _RECORD_OVERHEAD_BYTES * len(records)
        request = self._open(records, self._budget.take(key_of_request(records, partitions), size), done)
        request.in_order = in_order
        if sliced:
            self.spawn(self._take_slices(client, request, records), "slices")
        else:
            client.take(request, records, at_once=not self._is_crowded(len(records)))

    def _is_crowded(self, records: int) -> bool:
        """Return whether requests fill batches with each other, now or a moment ago."""
        now = clock.monotonic()
        if self._open_requests > _FEW_REQUESTS or records > _FEW_RECORDS:
            self._crowded_at = now
        return now - self._crowded_at < _CROWD_SECONDS

    def _open(self, records: Sequence[OutgoingRecord], claim: Claim, done: Done) -> WriteRequest:
        """Return a request whose bytes are counted already."""
        assert self._bridge
        if not self._open_requests:
            self._idle.clear()
        self._open_requests += 1
        return WriteRequest(records, claim, self._bridge.post, done, [None] * len(records))

    def check_capacity(self, topic: str, size_bytes: int) -> None:
        """Raise ProducerQueueFull unless a request to several partitions of a topic fits, before it is encoded."""
        self._budget.check((topic, SEVERAL), size_bytes)

    async def drain(self, deadline: Deadline) -> None:
        if self._open_requests:
            await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)

    async def stop(self) -> None:
        for client in filter(None, (self._client, self._alone)):
            await client.stop()
        await super().stop()

    def _finish(self, requests: list[WriteRequest]) -> None:
        for request in requests:
            done, request.done = request.done, None
            if done:
                self._open_requests -= 1
                if request.is_suspected and not request.is_alone:
                    self._write_alone(request, done)
                else:
                    self._budget.release(request.claim)
                    done(request.results)
        last = requests[-1]
        writer = self._alone if last.is_alone else self._client
        assert writer
        if (type(last.results) is WrittenRecords or type(last.results[0]) is Produced) and self._settings.acks != 0:
            writer.written()
            self._admin.reachability.answered()
        if not self._open_requests:
            self._idle.set()

    def _write_alone(self, request: WriteRequest, done: Done) -> None:
        """Write the records again whose batch was refused, each in a batch of one record."""
        results, suspects = request.results, request.suspects()

        def take(found: Sequence[ProduceResult]) -> None:
            for index, result in zip(suspects, found, strict=True):
                results[index] = result
            done(results)

        try:
            client = self._client_for_alone()
        except Exception as cause:  # noqa: BLE001 boundary: no further client can be made, and the request must end
            text = f"a record of the same batch was refused, and creating a client for single records failed: {cause!r}"
            self._budget.release(request.claim)
            take([errors.KafkaUnavailable(text)] * len(suspects))
            return
        records = [request.records[index] for index in suspects]
        alone = self._open(records, request.claim, take)
        alone.is_alone = True
        client.take(alone, records)

    def _client_for_alone(self) -> ProducerClient:
        if not (self._client and self._client.is_running):
            raise errors.KafkaUnavailable("the process is stopping")
        if self._alone is None:
            settings = self._settings.with_properties({"batch.size": 1})
            self._alone = self._open_client(f"{self.name}_alone", settings)
        return self._alone
