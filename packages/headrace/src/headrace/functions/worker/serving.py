"""One frame of work in the worker: keys and values are decoded, the handler is called for each record."""

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from time import perf_counter
from types import CoroutineType
from typing import Any, NamedTuple

import msgspec

from headrace import framing
from headrace.config.format_list import STRINGS
from headrace.errors import DecodeError, HeadraceError
from headrace.formats.plain import Convert, JsonCodec, unframe
from headrace.formats.schema_codec import PLAIN_CODECS, compile_schema
from headrace.framing import ProtocolBroken, encode_frame
from headrace.functions import protocol
from headrace.functions.sdk import Context, Event, EventSource, TriggerInfo
from headrace.functions.worker.handler import Handler, Responses, Unusable, body_type, failure
from headrace.functions.worker.http_events import RequestResponses

_TEXTS = frozenset(("topic", "path", "id", "content_type", "method", "url", "type", "type_version", "version"))
_TEXTS |= {"trigger", "headers", "fields"}


class Bodies:
    """Decodes by format names; knows the schemas that the parent has sent."""

    def __init__(self) -> None:
        self._schemas: dict[int, Convert | HeadraceError] = {}

    def learn(self, schema: protocol.Schema) -> None:
        """Take a schema; if it is not usable, only its own records cannot be decoded."""
        try:
            codec = compile_schema(schema.schema_type, schema.text, schema.references)
            self._schemas[schema.schema_id] = codec.decode_python
        except HeadraceError as cause:
            self._schemas[schema.schema_id] = cause

    def decoder(self, format_name: str) -> Convert | None:
        """Return the decoder of a format, which raises `DecodeError`; None if the format is bytes."""
        plain = PLAIN_CODECS.get(format_name)
        return plain.decode_python if plain else self._decode_framed

    def _decode_framed(self, data: bytes) -> Any:
        schema_id, payload = unframe(data)
        decode = self._schemas.get(schema_id)
        if decode is None:
            raise DecodeError(f"the bytes name schema {schema_id}, which the schema registry does not have")
        if isinstance(decode, HeadraceError):
            raise DecodeError(f"schema {schema_id} is not usable: {decode.description}")
        return decode(payload)


class _RecordEvent(Event):
    """An event of a record. Its attributes are set where it is made: arguments would make it twice as expensive."""

    __init__ = object.__init__


class _BytesEvent(_RecordEvent):
    """An event whose texts are bytes, as Nuclio's with `NUCLIO_PYTHON_DECODE_EVENT_STRINGS: no`."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return _as_bytes(found) if name in _TEXTS else found


def _event_of(
    kind: type[Event], body: Any, key: Any, headers: Any, offset: int, timestamp_ms: int, origin: EventSource
) -> Event:
    event = kind()
    event.body = body
    event.key = key
    event.offset = offset
    event.timestamp_ms = timestamp_ms
    event._headers = headers
    event._origin = origin
    return event


def _as_bytes(found: Any) -> Any:
    if isinstance(found, TriggerInfo):
        return TriggerInfo(*map(_as_bytes, found))
    if isinstance(found, dict):
        return {_as_bytes(name): _as_bytes(value) for name, value in found.items()}
    return found.encode() if isinstance(found, str) else found


class _Trigger(NamedTuple):
    info: TriggerInfo
    decode: Callable[[Event], protocol.Result | None] | None
    """Decodes key and value of an event; returns the result of a record that cannot be decoded."""
    responses: Responses
    batch_size: int


class Serving:
    """Serves frames of work with one handler."""

    def __init__(self, handler: Handler, context: Context, setup: protocol.Setup, progress: mmap.mmap) -> None:
        """Prepare; `progress` is the memory that `FramesInFlight` describes."""
        self.resolve: Callable[[Any], Any] | None = None
        """Runs a coroutine that the handler returns; None if `results` awaits it."""
        self.bodies = Bodies()
        self._handler = handler
        decodes = os.environ.get("NUCLIO_PYTHON_DECODE_EVENT_STRINGS", "").lower()
        self._kind = _BytesEvent if decodes in ("no", "false", "disable", "disabled") else _RecordEvent
        self._context = context
        self._triggers = [self._trigger_of(trigger) for trigger in setup.triggers]
        self._progress = memoryview(progress).cast("Q")
        # A process that the handler forks must not serve further records: counting one raises there.
        os.register_at_fork(after_in_child=self._progress.release)
        self._begun = 0
        self._trigger = 0
        self._event: Event | None = None
        """The one at work, the first of a batch; None between frames."""
        self._batch: Sequence[Event] = ()
        """Of the frame at work, if a call gets several events."""
        self._emitted: dict[int, list[protocol.Output]] = {}
        """Outputs of the frame at work, by the index of their record."""
        context._emit, context._at_work = self._emit, lambda: self._event

    def _trigger_of(self, trigger: protocol.TriggerSetup) -> _Trigger:
        value = _validating(self.bodies.decoder(trigger.value_format), body_type(self._handler), trigger)
        decode = _decoder_of(self.bodies.decoder(trigger.key_format), value)
        if trigger.requests:
            requests = RequestResponses(trigger.output_format, bool(trigger.output_topic))
            complete = partial(requests.complete, decode=decode, typed=value is not None)
            return _Trigger(TriggerInfo(trigger.kind, trigger.name), complete, requests, 0)
        responses = Responses(trigger.output_format, bool(trigger.output_topic))
        return _Trigger(TriggerInfo(name=trigger.name), decode, responses, trigger.batch_size)

    async def serve(self, work: protocol.Work, stop: int = -1) -> bytearray:
        """Call the handler as `results` does, and return the response to the parent."""
        began = perf_counter()
        results = await self.results(work, stop)
        response: protocol.ToParent = protocol.Results(results, seconds := perf_counter() - began)
        if len(results) == len(work.offsets):
            bodies: Any = results if {*map(type, results)} == {bytes} else []
            response = protocol.Done(seconds, bodies) if bodies or not any(results) else response
        try:
            return encode_frame(response)
        except Exception:  # noqa: BLE001 boundary to user code: the one result that cannot be sent is a failure
            fitting = _fitting(results, work.in_order)
        self._progress[0] = self._begun + len(fitting)
        return encode_frame(protocol.Results(fitting, seconds))

    async def results(self, work: protocol.Work, stop: int = -1) -> list[protocol.AnyResult]:
        """Call the handler for each record or batch and return the results of the records that were begun.

        The parent writes `stop` into shared memory to stop this frame between two records.
        """
        results: list[protocol.AnyResult] = [None] * len(work.offsets)
        self._begun, self._trigger = self._progress[0], work.trigger
        serve = self._serve_batches if self._triggers[work.trigger].batch_size else self._serve_each
        begun = await serve(work, results, stop)
        await self._uncancel()
        del results[begun:]
        for index, outputs in self._emitted.items():
            result = results[index]
            if isinstance(result, bytes):
                result = protocol.Result([protocol.Output(result, [])])
            if result is None or not result.error:
                outputs += result.outputs if result else []
                results[index] = protocol.Result(outputs, held=result is not None and result.held)
        self._event = None
        self._batch = ()
        self._emitted = {}
        return results

    async def _serve_each(self, work: protocol.Work, results: list[protocol.AnyResult], stop: int) -> int:
        handler, resolve = self._handler, self.resolve
        context, progress, first, in_order = self._context, self._progress, self._begun + 1, work.in_order
        trigger = self._triggers[work.trigger]
        responses, decode = trigger.responses, trigger.decode
        nothing, is_cancelled = responses.nothing, self._is_cancelled()
        kind, source = self._kind, EventSource(work.topic, work.partition, work.partitions, trigger.info)
        numbers, each_headers = range(first, first + len(results)), work.headers or repeat(None)
        columns = numbers, work.values, work.keys, each_headers, work.offsets, work.timestamps_ms
        number: int
        for number, body, key, headers, offset, timestamp_ms in zip(*columns, strict=False):
            if progress[1] == stop:
                return number - first
            progress[0] = number
            self._event = event = kind()
            event.body = body
            event.key = key
            event.offset = offset
            event.timestamp_ms = timestamp_ms
            event._headers = headers
            event._origin = source
            if decode and (undecodable := decode(event)):
                results[number - first] = undecodable
                continue
            if is_cancelled and is_cancelled():
                await self._uncancel()
            try:
                response = handler(context, event)
                if response is nothing:
                    continue
                if type(response) is CoroutineType:
                    response = resolve(response) if resolve else await response
                result = None if response is nothing else responses.result_of(response)
            except BaseException as cause:  # noqa: BLE001 boundary to user code: this record fails with its trace
                result = failure(cause)
            results[number - first] = result
            if in_order and type(result) is protocol.Result and result.error:
                return number - first + 1
        return len(results)

    async def _serve_batches(self, work: protocol.Work, results: list[protocol.AnyResult], stop: int) -> int:
        handler, resolve = self._handler, self.resolve
        trigger, known, failed = self._triggers[work.trigger], list[int](), False
        columns = work.values, work.keys, work.headers or repeat(None), work.offsets, work.timestamps_ms
        source = EventSource(work.topic, work.partition, work.partitions, trigger.info)
        self._batch = [*map(_event_of, repeat(self._kind), *columns, repeat(source))]
        for index, event in enumerate(self._batch):
            self._progress[0] = self._begun + index + 1  # a record that crashes its codec is to blame
            results[index] = trigger.decode(event) if trigger.decode else None
            known += [] if results[index] else [index]
        self._progress[0] = self._begun
        for first in range(0, len(known), trigger.batch_size):
            if self._progress[1] == stop or (failed and work.in_order):
                self._progress[0] = self._begun + known[first]
                return known[first]
            indexes = known[first : first + trigger.batch_size]
            batch = [self._batch[index] for index in indexes]
            self._event = batch[0]
            self._progress[0] = self._begun + indexes[0] + 1
            await self._uncancel()
            try:
                response = handler(self._context, [*batch])  # a list of its own, which it may consume
                if type(response) is CoroutineType:
                    response = resolve(response) if resolve else await response
                found = trigger.responses.results_of(response, batch)
            except BaseException as cause:  # noqa: BLE001 boundary to user code: these records fail with its trace
                found = [msgspec.structs.replace(failure(cause), shared=len(batch) > 1)] * len(batch)
            for index, result in zip(indexes, found, strict=True):
                results[index] = result
                failed = failed or bool(isinstance(result, protocol.Result) and result.error)
        self._progress[0] = self._begun + len(results)
        return len(results)

    def _is_cancelled(self) -> Callable[[], int] | None:
        """Return what tells whether an async handler has cancelled the task of all records; None for a plain one."""
        if self.resolve:
            return None
        import asyncio  # here, so that plain handlers start without it

        task = asyncio.current_task()
        return task.cancelling if task else None

    async def _uncancel(self) -> None:
        """Take back what an async handler has cancelled, or the next record would get it."""
        is_cancelled = self._is_cancelled()
        if is_cancelled and is_cancelled():
            import asyncio

            while (task := asyncio.current_task()) and task.cancelling():
                task.uncancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    def _emit(self, topic: str, key: Any, value: Any, headers: Any, event: Event | None) -> None:
        trigger = self._triggers[self._trigger]
        if self._event is None:
            raise RuntimeError(
                "emit outside a call of the handler: an output belongs to a record, so emit before it returns"
            )
        if trigger.batch_size and event is None:
            raise RuntimeError("emit in a batch without its event: write event=, because an output belongs to a record")
        index = self._batch.index(event) if trigger.batch_size else self._progress[0] - self._begun - 1
        self._emitted.setdefault(index, []).append(trigger.responses.emitted(topic, key, value, headers))


def _fitting(results: Sequence[protocol.AnyResult], in_order: bool) -> list[protocol.AnyResult]:
    """Return the first results that fit in one response; if they are in order, up to the first that cannot be sent.

    A result that cannot be sent is a failure. The parent sends the records of the missing results again.
    """
    fitting, size_bytes = list[protocol.AnyResult](), 0
    for result in results:
        sent = result
        try:
            own_bytes = len(encode_frame(protocol.Results([result])))
        except Exception as cause:  # noqa: BLE001 boundary to user code: this record fails
            name = "RecordTooLarge" if isinstance(cause, ProtocolBroken) else type(cause).__name__
            sent = protocol.Result(error=name, reason=f"what the handler made cannot be sent: {cause}")
            own_bytes = len(encode_frame(protocol.Results([sent])))
        size_bytes += own_bytes
        if fitting and size_bytes > framing.MAX_FRAME_BYTES:
            return fitting
        fitting.append(sent)
        if in_order and sent is not result:
            return fitting
    return fitting


def _decoder_of(key: Convert | None, value: Convert | None) -> Callable[[Event], protocol.Result | None] | None:
    """Return what decodes key and value of an event; None if there is nothing to decode."""

    def decode(event: Event) -> protocol.Result | None:
        what, body = "key", event.body
        event.size = len(body or b"")
        try:
            if key and event.key is not None:
                event.key = key(event.key)
            what = "value"
            if value and body is not None:
                event.body = value(body)
        except DecodeError as cause:
            reason = f"{what}: {cause.description}"
            return protocol.Result(error="DecodeError", reason=reason, undecodable=True)
        except BaseException as cause:  # noqa: BLE001 boundary to codecs and types: this record fails with its trace
            return failure(cause)
        return None

    return decode if key or value else None


def _validating(decode: Convert | None, body: Any, trigger: protocol.TriggerSetup) -> Convert | None:
    """Return a decoder that also makes the handler's type; `decode` itself if the handler has no type.

    None for the JSON of a request, which `RequestResponses.complete` decodes.
    """
    if body is None:
        return None if trigger.requests and decode is JsonCodec.decode_python else decode
    if decode is None or trigger.value_format in STRINGS:
        text = f"the handler takes Event[{getattr(body, '__name__', body)}], and valueFormat is {trigger.value_format}"
        raise Unusable(f"{text}: write json, or the format of the schema")
    decode_plain, validate = decode, getattr(body, "model_validate", None) or partial(msgspec.convert, type=body)

    def validated(data: bytes) -> Any:
        plain = decode_plain(data)
        try:
            return validate(plain)
        except (msgspec.ValidationError, ValueError) as cause:
            raise DecodeError(_reason_of(cause)) from None

    return validated


def _reason_of(invalid: Exception) -> str:
    """Return why a value is not valid, without the value, which pydantic's own text has."""
    if not hasattr(invalid, "errors"):
        return str(invalid)
    found = invalid.errors(include_input=False, include_url=False)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
