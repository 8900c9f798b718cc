"""`POST /producers/{topic}` as NDJSON: a stream with a record per line, and a receipt per line in return.

The response begins before the body is complete, so a client must read while it sends.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from headrace.config.http import HttpConfig
from headrace.errors import Draining, HeadraceError, InvalidRequest
from headrace.http.messages import encoding_refused, unknown_name
from headrace.http.request import ClientGone, HttpRequest
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.runtime import Clock, SystemClock
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.produce_request import SchemaChoices
from headrace.sidecar.produce.produce_stream import ProduceStream
from headrace.sidecar.produce.record_ids import record_ids

NDJSON: Final = (b"application/x-ndjson", b"application/ndjson", b"application/jsonl")
_START: Final = [(b"content-type", b"application/x-ndjson"), (b"connection", b"close")]
_NAMES: Final = SchemaChoices.__struct_encode_fields__
_FORMATS: Final = ("keyFormat", "valueFormat")
_REFERENCES: Final = ("keySchemaReferences", "valueSchemaReferences")
_LINGER_SECONDS: Final = 1.0

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class StreamProduceRoute:
    """Serves streams."""

    def __init__(self, service: ProduceService, metrics: Metrics, settings: HttpConfig) -> None:
        self._service = service
        self._metrics = metrics
        self._settings = settings
        self._clock: Clock = SystemClock()
        self._open: set[ProduceStream] = set()
        self.spawn: Spawn
        """Starts a task; set by the server."""

    def drain(self) -> None:
        """End every stream; the last line states the reason."""
        for stream in self._open:
            stream.end(Draining())

    async def __call__(self, topic: str, request: HttpRequest) -> None:
        """Write the records of a request as they arrive, and respond with a line for each."""
        headers = request.head.headers
        if encoding := headers.get(b"content-encoding"):
            raise encoding_refused(encoding, "streams must not be compressed")
        if IDEMPOTENCY_KEY in headers:
            raise InvalidRequest("Idempotency-Key is not allowed with a stream: leave it out")
        choices = choices_of(request.head.query)
        stream = ProduceStream(
            self._service, topic, choices, record_ids(request, each=True), self._settings, self._clock
        )
        await self._service.check(topic, choices)
        request.is_streaming = True
        reader = self.spawn(_read(stream, request), "stream")
        self._open.add(stream)
        try:
            await self._answer(stream, reader, request)
        finally:
            self._open.discard(stream)
            reader.cancel()

    async def _answer(self, stream: ProduceStream, reader: asyncio.Task[None], request: HttpRequest) -> None:
        weaker = [] if self._service.acks == "all" else [(b"x-headrace-acks", str(self._service.acks).encode())]
        await request.response.start(200, [*_START, *weaker])
        while (receipts := await stream.receipts()) is not None:
            self._metrics.produced(receipts.requested_records, receipts.written_records)
            await request.response.write(receipts.text)
        if last := stream.last_line():
            reader.cancel()
            await request.response.write(last)
            # Closing with unread bytes resets the connection, and the client may lose its receipts.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(request.body.throw_away(), _LINGER_SECONDS)
        await request.response.end()


async def _read(stream: ProduceStream, request: HttpRequest) -> None:
    more = True
    while more:
        try:
            part = await request.body.receive()
        except HeadraceError as error:  # the caller's credentials have ended
            stream.end(error)
            return
        except ClientGone:  # drop its incomplete line
            stream.end()
            return
        more = await stream.feed(part, last=not request.body.has_more)


def choices_of(query: bytes) -> SchemaChoices:
    """Parse formats and schemas from a query string with the names of the JSON request.

    Raises:
        InvalidRequest: A name is unknown or repeated, or a value is not valid.
    """
    given: dict[str, Any] = {}
    try:
        for name, value in parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict"):
            if name not in _NAMES:
                raise unknown_name("the query parameter", name, _NAMES)
            if name in given:
                raise InvalidRequest(f"the query parameter {name} is repeated: send it once")
            given[name] = value
            if name in _REFERENCES or (name in _FORMATS and value.isdecimal()):
                given[name] = msgspec.json.decode(value)
        return msgspec.convert(given, SchemaChoices, strict=False)
    except (ValueError, RecursionError) as cause:
        raise InvalidRequest(f"the query string is not valid: {cause}") from cause
