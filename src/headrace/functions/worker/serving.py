"""One frame of work in the worker: the handler is called for each record, and the answers become one reply."""

import mmap
from collections.abc import Awaitable, Callable
from types import CoroutineType
from typing import Any

from headrace.errors import DecodeError
from headrace.functions import wire
from headrace.functions.sdk import Context, Event, Origin, TriggerInfo
from headrace.functions.worker.bodies import Bodies, Decode
from headrace.functions.worker.handler import Answers, Handler, failure

_DONE = wire.encode_frame(wire.Done())


class Serving:
    """Answers the parent's messages with one handler."""

    def __init__(
        self,
        handler: Handler,
        context: Context,
        setup: wire.Setup,
        progress: mmap.mmap,
        resolve: Callable[[Any], Awaitable[Any]],
    ) -> None:
        """Prepare.

        Args:
            progress: Its first 8 bytes hold the number of records begun since the worker started; the parent reads
                it to know which record a dead or hung worker was at.
            resolve: Runs a coroutine that the handler has returned.
        """
        self._handler = handler
        self._context = context
        self._answers = Answers(setup.output_format)
        self._bodies = Bodies()
        self._decode_key = self._bodies.decoder(setup.key_format)
        self._decode_value = self._bodies.decoder(setup.value_format)
        self._progress = memoryview(progress).cast("Q")
        self._begun = 0
        self._resolve = resolve

    async def answer(self, message: wire.ToWorker) -> bytearray | None:
        """Return the frame that answers a message, None if it needs no answer."""
        if isinstance(message, wire.Schema):
            self._bodies.learn(message)
            return None
        assert isinstance(message, wire.Work)
        results = await self._work(message)
        return _DONE if results is None else wire.encode_frame(wire.Results(results))

    async def _work(self, work: wire.Work) -> list[wire.Result | None] | None:
        results: list[wire.Result | None] | None = None
        trigger = TriggerInfo(name=self._context.trigger.name)
        origin = Origin(work.topic, work.partition, work.partitions, trigger)
        progress, begun, handler, context = self._progress, self._begun, self._handler, self._context
        raw = self._decode_key is None and self._decode_value is None
        headers = work.headers or [None] * len(work.offsets)
        rows = zip(work.values, work.keys, headers, work.offsets, work.timestamps_ms, strict=True)
        for index, (value, key, header, offset, timestamp_ms) in enumerate(rows):
            begun += 1
            progress[0] = begun
            try:
                event = Event(value, key, header, offset, timestamp_ms, origin)
                if not raw:
                    self._decode(event)
                answer = handler(context, event)
                if type(answer) is CoroutineType:
                    answer = await self._resolve(answer)
                if answer is None:
                    continue
                result = self._answers.result_of(answer)
            except DecodeError as cause:
                result = wire.Result(error="DecodeError", reason=cause.description, undecodable=True)
            except BaseException as cause:  # noqa: BLE001 boundary to user code: this record fails with its trace
                result = failure(cause)
            if result is not None:
                results = results or [None] * len(work.offsets)
                results[index] = result
        self._begun = begun
        return results

    def _decode(self, event: Event) -> None:
        event._size = event.size
        event.key = _decoded("key", event.key, self._decode_key)
        event.body = _decoded("value", event.body, self._decode_value)


def _decoded(what: str, data: bytes | None, decode: Decode | None) -> Any:
    if data is None or decode is None:
        return data
    try:
        return decode(data)
    except DecodeError as cause:
        raise DecodeError(f"{what}: {cause.description}") from None
