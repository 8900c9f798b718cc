"""Writes through the compiled module: delivery reports are events that the loop takes, many in a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from headrace.kafka.client import library
from headrace.kafka.client.properties import client_log
from headrace.kafka.polled_client import Refused
from headrace.kafka.write_request import ProduceResult, Results, WriteRequest
from headrace.records import OutgoingRecord, WrittenRecords
from headrace.runtime import LoopBridge, blocking, clock

_MOST_REPORTS = 4000
"""Most reports of one turn of the loop: they take about a millisecond."""
_NOT_WRITTEN: Final = 0
"""`rd_kafka_message_status` of a record that no broker can have."""
_LEVELS: Final = (50, 50, 50, 40, 30, 20, 20, 10)
"""Python's level of each level of syslog."""
_INVALID_ARGUMENT = library.KafkaError._INVALID_ARG


class NativeClient:
    """Does what `PolledClient` does, without an object and a call for each record."""

    def __init__(
        self,
        module: ModuleType,
        properties: Mapping[str, Any],
        note_error: Callable[[library.KafkaError], None],
        result: Callable[..., ProduceResult],
        bridge: LoopBridge[WriteRequest],
    ) -> None:
        """Open it; requests whose results are all known go to the loop of `bridge`."""
        self._note_error = note_error
        self._result = result
        self._bridge = bridge
        self._is_empty = blocking.Event()
        self._is_closed = False
        own = {name: _text(value) for name, value in properties.items() if name != "logger"}
        try:
            self._client = module.Producer({**own, "log.queue": "true"})
        except ValueError as cause:
            raise library.KafkaException(library.KafkaError(_INVALID_ARGUMENT, str(cause))) from None

    def __len__(self) -> int:
        return len(self._client)

    def open(self, on_death: Callable[[BaseException], None]) -> None:
        self._bridge.loop.call_soon_threadsafe(self._watch, on_death)

    def _watch(self, on_death: Callable[[BaseException], None]) -> None:
        def take() -> None:
            if not self._is_closed:
                try:
                    self._bridge.collect(functools.partial(self._drain, take))
                except Exception as cause:  # noqa: BLE001 boundary: the owner gets it, as from a thread
                    on_death(cause)

        self._bridge.loop.add_reader(self._client.fileno(), take)
        take()  # the descriptor tells only what comes into an empty queue

    def produce(self, request: WriteRequest, records: Sequence[OutgoingRecord], first: int, at_once: bool) -> Refused:
        refused = self._client.produce(request, records, first, at_once)
        if refused is None:
            return None
        index, code, text, is_fatal = refused
        if code == _INVALID_ARGUMENT:
            return index, ValueError(text)
        return index, library.KafkaException(library.KafkaError(code, text, is_fatal))

    def _drain(self, again: Callable[[], None]) -> None:
        completed, events, more = self._client.drain(_MOST_REPORTS)
        for request, first, count, found in completed:
            if type(found) is bytes:
                results: Results = WrittenRecords(count, found)
            else:
                results = [self._result_of(request.records[at], *one) for at, one in enumerate(found, first)]
            request.reported(first, count, results)
        for event in events:
            if event is not None and len(event) == 2:
                client_log.log(_LEVELS[event[0]], event[1])
            elif event is not None:
                self._note_error(library.KafkaError(*event))
        if more:
            self._bridge.loop.call_soon(again)
        elif not len(self._client):
            self._is_empty.set()

    def _result_of(self, record: OutgoingRecord, code: int, status: int, partition: int, offset: int) -> ProduceResult:
        if code:
            error, perhaps_written = library.KafkaError(code), status != _NOT_WRITTEN
            return self._result(record.topic, partition, None, error, perhaps_written=perhaps_written)
        return self._result(record.topic, partition, offset if offset >= 0 else None, None)

    def serve(self, work: blocking.Event, seconds: float) -> None:
        work.wait(seconds)
        work.clear()

    def purge(self, *, in_flight: bool = True) -> None:
        self._client.purge(in_flight)

    def close(self, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while len(self._client) and (left := end - clock.monotonic()) > 0:
            self._is_empty.clear()
            if len(self._client):
                self._is_empty.wait(left)
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._bridge.loop.call_soon_threadsafe(self._bridge.loop.remove_reader, self._client.fileno())
        self._client.close()

    def set_sasl_credentials(self, user: str, password: str) -> None:
        self._client.set_sasl_credentials(user, password)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
