"""Writes through Kafka's Python client: each delivery report is a call, on the thread that polls it.

`NativeClient` has the same methods.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.kafka.client import library
from headrace.kafka.client.error_map import ClientErrors
from headrace.kafka.write_request import WriteRequest
from headrace.records import OutgoingRecord
from headrace.runtime import blocking

Refused = tuple[int, Exception] | None
"""The index of the first record that a client did not take, with the reason; None if it took all."""


class PolledClient:
    """One client of Kafka, for the two that write: the loop hands records over, and the thread serves."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        note_error: Callable[[library.KafkaError], None],
        result: Callable[[str, int, int | None, library.KafkaError | None], Any],
    ) -> None:
        """Open it; `result` translates a report: topic, partition, offset if there is one, and error.

        If `note_error` raises, the call that has found the error does.
        """
        self._client = library.Producer({**properties, "error_cb": note_error})
        self._note_error = note_error
        self._result = result

    def __len__(self) -> int:
        """Return how many records have no report yet."""
        return len(self._client)

    def open(self, on_death: Callable[[BaseException], None]) -> None:
        """Begin to take reports; `on_death` is called on the loop if that fails there."""

    def produce(self, request: WriteRequest, records: Sequence[OutgoingRecord], first: int, at_once: bool) -> Refused:
        """Take the records of a request from its index `first` on, up to one that is refused; on the loop.

        This client cannot send them before `linger.ms` is over.
        """
        produce: Any = self._client.produce  # its stubs forget that a list of headers is invariant
        for index, record in enumerate(records, first):
            reported = functools.partial(self._reported, request, index)
            to = -1 if record.partition is None else record.partition
            try:
                produce(record.topic, record.value, record.key, to, reported, None, record.timestamp_ms, record.headers)
            except Exception as cause:  # noqa: BLE001 boundary: the record was not taken, and its request must end
                return index, cause
        return None

    def _reported(self, request: WriteRequest, index: int, error: library.KafkaError | None, record: Any) -> None:
        offset = None
        if error is None:
            try:
                offset = record.offset()
            except SystemError:  # the client raises a fatal error in the first call of this report
                offset = record.offset()
        else:
            try:
                error.code()
            except SystemError as fatal:
                if isinstance(fatal.__cause__, library.KafkaException):
                    self._note_error(fatal.__cause__.args[0])
        request.reported(index, 1, [self._result(record.topic(), record.partition(), offset, error)])

    def serve(self, work: blocking.Event, seconds: float) -> None:
        """Take reports for a while, on the thread."""
        self.poll(seconds)

    def poll(self, seconds: float) -> None:
        """Take reports, errors and statistics; wait until there is one."""
        with contextlib.suppress(SystemError):  # a fatal error that a report has taken
            try:
                with ClientErrors():
                    self._client.poll(seconds)
            except library.KafkaException as cause:
                self._note_error(cause.args[0])

    def flush(self, seconds: float) -> int:
        """Have everything sent, and take reports; return how many records have none after the time limit."""
        with ClientErrors():
            return self._client.flush(seconds)

    def purge(self, *, in_flight: bool = True) -> None:
        """Have each waiting record reported as not written, and one in flight as unknown."""
        self._client.purge(in_flight=in_flight)

    def close(self, seconds: float) -> None:
        """Take the last reports, on the thread."""
        with contextlib.suppress(SystemError, library.KafkaException):
            self.flush(seconds)

    def set_sasl_credentials(self, user: str, password: str) -> None:
        self._client.set_sasl_credentials(user, password)

    def transact(self, step: str, *arguments: Any) -> None:
        """Run a step of a transaction: a method of Kafka's Python client, by its name, with its arguments.

        Before a transaction ends, each of its records must have a report.
        """
        with ClientErrors():
            getattr(self._client, step)(*arguments)
