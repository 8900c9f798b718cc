"""A backend as a destination: it gets one POST per delivery, and its response gives one reply per record."""

import functools
import ssl
from collections.abc import Callable, Coroutine, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final

from headrace.config.backend import ONE_RECORD_MODES, BackendConfig
from headrace.config.consumers import RetryConfig
from headrace.delivery.delivery_span import begin_delivery, deliver_in
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.errors import DecodeError, DestinationUnavailable, RegistryUnavailable
from headrace.extras import hook
from headrace.records import RecordBatch, TopicPartition
from headrace.runtime import Clock, Service
from headrace.runtime.telemetry import tracing
from headrace.sidecar.reactive import cloud_events
from headrace.sidecar.reactive.backend_connection import BackendResponse
from headrace.sidecar.reactive.client import MAX_RESPONSE_BYTES, client_of
from headrace.sidecar.reactive.delivery_lines import DeliveryLines
from headrace.sidecar.reactive.envelope import PayloadDecoder, array_of, replies_of

_EXCERPT_BYTES: Final = 2000
_MOST_SUSPECTS: Final = 1000
_GATEWAY: Final = (502, 503, 504)
"""Responses of a proxy whose backend is down."""


class HttpDestination(Service):
    """Posts records to a backend, in the form that its mode requires."""

    def __init__(
        self,
        name: str,
        backend: BackendConfig,
        retry: RetryConfig,
        payloads: PayloadDecoder,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        *,
        rows: bool = False,
    ) -> None:
        """Prepare; no connection is opened. With `rows` the values are JSON texts that are posted without the records.

        Args:
            name: Of the consumer.
            tls: Context of `https` connections; the system's authorities when None.
        """
        super().__init__(f"reactive {name} backend")
        self._consumer = name
        self.client = client_of(backend, clock, tls, max_response_bytes)
        self._results = backend.mode == "results"
        self._answers: Any = None
        """What reads its responses, and writes requests with several records, in place of the mode."""
        self._health = backend.health.path if backend.health else ""
        self._suspects: dict[tuple[TopicPartition, int], None] = {}
        """Records that were sent alone, and at which it closed the connection."""
        self._retry = retry
        self._payloads = payloads
        self._clock = clock
        write = _rows if rows and backend.mode not in ONE_RECORD_MODES else _WRITERS[backend.mode]
        if backend.answers == "dapr":
            self._answers = hook("dapr_answers", "backend.answers: dapr")(retry, backend.mode in ONE_RECORD_MODES)
            write = self._answers.write or write
        self._request = functools.partial(write, payloads, DeliveryLines(self.client.lines))

    async def stop(self) -> None:
        self.client.close()

    def deliver(self, delivery: Delivery) -> Coroutine[Any, Any, Sequence[Reply]]:
        """Post the records that can be decoded; the others are dead letters at once."""
        records = RecordBatch.of(delivery.records)
        if self._payloads.needs_schemas or tracing.tracer:
            return self._load_and_deliver(delivery, records)
        return self._deliver(delivery, records)

    async def _load_and_deliver(self, delivery: Delivery, records: RecordBatch) -> Sequence[Reply]:
        """Fetch the schemas that the records name, and begin the span of the delivery, before it."""
        try:
            await self._payloads.load(records)
        except RegistryUnavailable as cause:
            raise DestinationUnavailable(f"waiting for the schema registry: {cause.description}") from cause
        span = begin_delivery(tracing.tracer, delivery, records) if tracing.tracer else None
        delivering = self._deliver(delivery, records)
        return await (deliver_in(span, delivering) if span else delivering)

    async def _deliver(self, delivery: Delivery, records: RecordBatch) -> Sequence[Reply]:
        """Post records; before one that is alone and a suspect, check whether the backend responds at all."""
        try:
            body, lines = self._request(delivery, records)
        except DecodeError:
            return await self._deliver_sound(delivery, records)
        is_suspect = bool(self._suspects) and (records.topic_partition, records.offsets[0]) in self._suspects
        is_alive = is_suspect and len(records) == 1 and await self._is_alive()
        try:
            response = await self.client.post(body, lines)
        except DestinationUnavailable as error:
            if error.broken_off and len(records) == 1:
                error.is_alive = is_alive
                position = records.topic_partition, records.offsets[0]
                error.advice = self._how_to_skip(*position)
                self._suspects[position] = None
                while len(self._suspects) > _MOST_SUSPECTS:
                    del self._suspects[next(iter(self._suspects))]
            raise
        return self._replies(response, records)

    def _how_to_skip(self, partition: TopicPartition, offset: int) -> str:
        where = f"--partition {partition.partition} --topic {partition.topic}"
        return f'to skip it: headrace reactive skip {self._consumer} {offset} {where} --reason "..."'

    async def _is_alive(self) -> bool:
        try:
            response = await (self.client.get(self._health) if self._health else self.client.options())
        except DestinationUnavailable:
            return False
        return response.status < 300 if self._health else response.status not in _GATEWAY

    async def _deliver_sound(self, delivery: Delivery, records: RecordBatch) -> Sequence[Reply]:
        replies: dict[int, Reply] = {}
        for record in records:
            try:
                self._request(delivery, RecordBatch.of([record]))
            except DecodeError as error:
                replies[record.offset] = Reply("DecodeError", error.description, reached=False, permanent=True)
        if sound := RecordBatch.of([record for record in records if record.offset not in replies]):
            replies.update(zip(sound.offsets, await self._deliver(delivery, sound), strict=True))
        return [replies[offset] for offset in records.offsets]

    def _replies(self, response: BackendResponse, sent: RecordBatch) -> list[Reply]:
        """Return what a response means for each record; raise if it concerns the whole backend or is not valid."""
        status = response.status
        if self._answers and (replies := self._answers.replies(status, response.body, sent)):
            return list(replies)
        if status < 300:
            return replies_of(response.body, sent) if self._results else [ACK] * len(sent)
        if self._retry.action_of_status(status) == "unavailable":
            wait = retry_after_seconds(response.headers.get("retry-after", ""), self._clock.time())
            url = self.client.url
            why = f"waiting for the backend {url}: it answers HTTP {status}"
            raise DestinationUnavailable(why, wait_seconds=wait, url=url)
        excerpt = response.body[:_EXCERPT_BYTES].decode(errors="replace")
        return [Reply(f"HTTP {status}", excerpt, status)] * len(sent)


Request = tuple[bytes, bytes]
"""Body and header lines of one POST."""


def _records(payloads: PayloadDecoder, lines: DeliveryLines, delivery: Delivery, records: RecordBatch) -> Request:
    body = array_of(delivery, records, payloads.keys.texts(records.keys), payloads.values.texts(records.values))
    return body, lines.of_array(delivery)


def _rows(_: PayloadDecoder, lines: DeliveryLines, delivery: Delivery, records: RecordBatch) -> Request:
    return b"[%b]" % b",".join(value or b"null" for value in records.values), lines.of_array(delivery)


def single(payloads: PayloadDecoder, lines: DeliveryLines, delivery: Delivery, records: RecordBatch) -> Request:
    """Return the request of mode `single`: its body is the value of the record."""
    _, _, key, value, _, _ = records.row
    return payloads.body(value), lines.of_record(delivery, records, payloads.key_text(key), payloads.content_type)


_WRITERS: Final[dict[str, Callable[[PayloadDecoder, DeliveryLines, Delivery, RecordBatch], Request]]] = {
    "results": _records,
    "status": _records,
    "single": single,
    "cloudevents_structured": cloud_events.structured,
    "cloudevents_binary": cloud_events.binary,
}


MAX_WAIT_SECONDS: Final = 300.0


def retry_after_seconds(value: str, now: float) -> float | None:
    """Return how long to wait, at most 300 s; None if the value is not a positive number or a future date."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text[:20])
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, OverflowError, TypeError):
            return None
    return min(seconds, MAX_WAIT_SECONDS) if seconds > 0 else None
