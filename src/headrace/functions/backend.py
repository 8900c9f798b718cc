"""A function as the backend of a reactive consumer: requests with arrays of records, answers with their results."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.delivery.outcomes import Delivery, Reply
from headrace.errors import DestinationUnavailable, EncodeError, HeadraceError
from headrace.formats.schema_codec import PLAIN_CODECS
from headrace.functions.destination import FunctionDestination
from headrace.records import Header, Record, TopicPartition

_OWN_HEADER = "X-Correlation-Id"
_NONE = msgspec.Raw(b"")


class _Entry(msgspec.Struct, rename="camel"):
    """One record of a request."""

    topic: str
    partition: int
    offset: int
    timestamp: int = -1
    headers: dict[str, str] = {}
    key: msgspec.Raw = _NONE
    value: msgspec.Raw = _NONE
    delivery_id: str = ""
    attempt: int = 1
    epoch: int = 0
    replay: str = ""


class FunctionBackend:
    """ASGI application that speaks the protocol of `backend.mode: results`.

    What the function is not to blame for is answered with status 503, so that its records are sent again without a new
    attempt; a failure that blames no single record of several with 500, so that they are sent again in halves.
    """

    def __init__(
        self, destination: FunctionDestination, formats: tuple[str, str], readiness: Callable[[], str], most_bytes: int
    ) -> None:
        """Take the formats of keys and values, what returns why the function is not ready, and the limit of a body."""
        self._most_bytes = most_bytes
        self._destination = destination
        self._formats = formats
        self._readiness = readiness

    async def __call__(
        self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer one request: POST is a batch, everything else asks whether the function is ready."""
        body, more = bytearray(), True
        while more and len(body) <= self._most_bytes:
            part = await receive()
            body += part.get("body", b"")
            more = part.get("more_body", False)
        if len(body) > self._most_bytes:
            text = f"the body is larger than {self._most_bytes} bytes: lower batch.max_bytes of the consumer, or raise "
            status, answer = 413, msgspec.json.encode({"error": text + "http.max_body_bytes of the function"})
        else:
            status, answer = await self._deliver(body) if scope["method"] == "POST" else self._health()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _health(self) -> tuple[int, bytes]:
        why = self._readiness()
        return 503 if why else 200, msgspec.json.encode({"ready": not why, "reason": why})

    async def _deliver(self, body: bytearray) -> tuple[int, bytes]:
        try:
            entries = msgspec.json.decode(body, type=list[_Entry])
            records = [self._record(entry) for entry in entries]
            replies = await self._replies(entries[0], records) if entries else []
        except (msgspec.MsgspecError, UnicodeDecodeError, EncodeError) as cause:
            hint = "set backend.mode: results, and key_format and value_format as keyFormat and valueFormat"
            return 503, msgspec.json.encode({"error": f"the request does not fit the function: {cause}; {hint}"})
        except HeadraceError as cause:
            return 503, msgspec.json.encode({"error": cause.description})
        if any(reply.shared for reply in replies):
            return 500, msgspec.json.encode({"error": next(reply.reason for reply in replies if reply.shared)})
        return 200, msgspec.json.encode([_result(reply) for reply in replies])

    async def _replies(self, first: _Entry, records: Sequence[Record]) -> Sequence[Reply]:
        partition, group = TopicPartition(first.topic, first.partition), first.delivery_id.partition(":")[0]
        delivery = Delivery(group, partition, first.epoch, records, first.attempt, first.replay)
        replies = await self._destination.deliver(delivery)
        if missed := next((reply for reply in replies if reply.error and not (reply.reached or reply.permanent)), None):
            raise DestinationUnavailable(missed.error)
        return replies

    def _record(self, entry: _Entry) -> Record:
        pairs = entry.headers.items()  # the consumer adds the one whose value is the id of the delivery
        headers: list[Header] = [
            (name, text.encode()) for name, text in pairs if (name, text) != (_OWN_HEADER, entry.delivery_id)
        ]
        key, value = map(_bytes_of, (entry.key, entry.value), self._formats)
        return Record(entry.topic, entry.partition, entry.offset, entry.timestamp, key, value, lambda: headers)


def _bytes_of(text: msgspec.Raw, format_name: str) -> bytes | None:
    return PLAIN_CODECS[format_name].encode(bytes(text)) if text else None


def _result(reply: Reply) -> dict[str, Any]:
    if not reply.error:
        return {"processed": True}
    trace = reply.stack or f"{reply.error}: {reply.reason}"
    return {"processed": False, "permanent": reply.permanent, "stacktrace": trace}
