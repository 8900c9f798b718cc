"""Writes through the compiled module: delivery reports are events that are taken many in a call.

The loop takes those of a client that was opened; `poll` and `flush` take those of another one, on the caller's thread.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client import library
from headrace.kafka.client.native import native_module
from headrace.kafka.client.properties import client_log
from headrace.kafka.polled_client import PolledClient, Refused
from headrace.kafka.write_request import Results, WriteRequest
from headrace.records import OutgoingRecord, WrittenRecords
from headrace.runtime import LoopBridge, blocking, clock

_MOST_REPORTS = 4000
"""Most reports of one turn of the loop: they take about a millisecond."""
_NOT_WRITTEN: Final = 0
"""`rd_kafka_message_status` of a record that no broker can have."""
_LEVELS: Final = (50, 50, 50, 40, 30, 20, 20, 10)
"""Python's level of each level of syslog."""
_INVALID_ARGUMENT: Final = library.KafkaError._INVALID_ARG
_QUEUE_FULL: Final = library.KafkaError._QUEUE_FULL


class NativeClient:
    """Does what `PolledClient` does, without an object and a call for each record."""

    def __init__(
        self,
        module: ModuleType,
        bridge: LoopBridge[WriteRequest] | None,
        properties: Mapping[str, Any],
        note_error: Callable[[library.KafkaError], None],
        result: Callable[..., Any],
    ) -> None:
        """Open it; requests whose results are all known go to the loop of `bridge`, if `open` is called."""
        self._note_error = note_error
        self._result = result
        self._observe = properties.get("stats_cb", len)
        self._bridge = bridge
        self._is_empty = blocking.Event()
        self._is_closed = False
        own = {name: _text(value) for name, value in properties.items() if isinstance(value, str | int | float)}
        try:
            self._client = module.Producer({**own, "log.queue": "true"})
        except ValueError as cause:
            raise library.KafkaException(library.KafkaError(_INVALID_ARGUMENT, str(cause))) from None

    def __len__(self) -> int:
        return len(self._client)

    def open(self, on_death: Callable[[BaseException], None]) -> None:
        assert self._bridge
        self._bridge.loop.call_soon_threadsafe(self._watch, self._bridge, on_death)

    def _watch(self, bridge: LoopBridge[WriteRequest], on_death: Callable[[BaseException], None]) -> None:
        def drain() -> None:
            if self._drain():
                bridge.loop.call_soon(take)

        def take() -> None:
            if not self._is_closed:
                try:
                    bridge.collect(drain)
                except Exception as cause:  # noqa: BLE001 boundary: the owner gets it, as from a thread
                    if not self._is_closed:  # by the thread meanwhile
                        on_death(cause)

        bridge.loop.add_reader(self._client.fileno(), take)
        take()  # the descriptor tells only what comes into an empty queue

    def produce(self, request: WriteRequest, records: Sequence[OutgoingRecord], first: int, at_once: bool) -> Refused:
        refused = self._client.produce(request, records, first, at_once)
        if refused is None:
            return None
        index, cause = refused
        if type(cause) is not tuple:
            return index, cause
        error = library.KafkaError(*cause)
        return index, BufferError(error.str()) if cause[0] == _QUEUE_FULL else library.KafkaException(error)

    def _drain(self) -> bool:
        """Take reports; return whether more are due."""
        completed, events, more = self._client.drain(_MOST_REPORTS)
        for request, first, count, found in completed:
            if type(found) is bytes:
                results: Results = WrittenRecords(count, found)
            else:
                results = [self._result_of(request.records[at], *one) for at, one in enumerate(found, first)]
            request.reported(first, count, results)
        if not more and not len(self._client):
            self._is_empty.set()
        for event in events:
            if type(event) is bytes:
                self._observe(event)
            elif event is not None and len(event) == 2:
                client_log.log(_LEVELS[event[0]], event[1])
            elif event is not None:
                self._note_error(library.KafkaError(*event))
        return bool(more)

    def _result_of(self, record: OutgoingRecord, code: int, status: int, partition: int, offset: int) -> Any:
        if code:
            error, perhaps_written = library.KafkaError(code), status != _NOT_WRITTEN
            return self._result(record.topic, partition, None, error, perhaps_written=perhaps_written)
        return self._result(record.topic, partition, offset if offset >= 0 else None, None)

    def serve(self, work: blocking.Event, seconds: float) -> None:
        work.wait(seconds)
        work.clear()

    def poll(self, seconds: float) -> None:
        readable = select.poll()
        readable.register(self._client.fileno(), select.POLLIN)
        readable.poll(seconds * 1000)
        while self._drain():
            pass

    def flush(self, seconds: float) -> int:
        end = clock.monotonic() + seconds
        while len(self._client) and (left := end - clock.monotonic()) > 0:
            self.poll(left)
        return len(self._client)

    def purge(self, *, in_flight: bool = True) -> None:
        self._client.purge(in_flight)

    def close(self, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while len(self._client) and (left := end - clock.monotonic()) > 0:
            self._is_empty.clear()
            if len(self._client):
                self._is_empty.wait(left)
        self._is_closed = True
        assert self._bridge
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._bridge.loop.call_soon_threadsafe(self._bridge.loop.remove_reader, self._client.fileno())
        self._client.close()

    def set_sasl_credentials(self, user: str, password: str) -> None:
        self._client.set_sasl_credentials(user, password)

    def transact(self, step: str, *arguments: Any) -> None:
        *offsets, seconds = arguments or (-1,)
        if offsets:
            offsets[0] = [(one.topic, one.partition, one.offset, one.metadata or "") for one in offsets[0]]
        milliseconds = int(seconds * 1000) if seconds >= 0 else -1
        if error := self._client.transact(step, milliseconds, *offsets):
            raise library.KafkaException(library.KafkaError(*error))


def new_client(
    kafka: KafkaConfig, properties: Mapping[str, Any], *calls: Any, bridge: LoopBridge[WriteRequest] | None = None
) -> PolledClient | NativeClient:
    """Open a client that writes, by the compiled module if it is usable; `calls` are those of `PolledClient`."""
    module = native_module(kafka)
    return NativeClient(module, bridge, properties, *calls) if module else PolledClient(properties, *calls)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
