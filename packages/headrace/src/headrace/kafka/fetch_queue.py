"""What a consumer's client has fetched, as columns: by the compiled module, or from the client's own objects."""

import contextlib
import gc
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client import library, native
from headrace.records import Header, RecordBatch, TopicPartition

_APPENDED = library.TIMESTAMP_LOG_APPEND_TIME
_OF_NO_INTEREST = library.KafkaError._UNKNOWN_PARTITION, library.KafkaError._UNKNOWN_TOPIC
"""The client calls `error_cb` for these, which looks at connections only; what assigns partitions checks them."""


_headers = operator.methodcaller("headers")
"""For a name that is not UTF-8 the client returns a list and sets an error, which a specialised call overlooks."""


class FetchEvent(NamedTuple):
    """An error of a partition or of the client, or the end of a partition."""

    error: library.KafkaError
    partition: TopicPartition
    """Without a name if the event is not about one; without a number if it is about a topic."""
    offset: int | None


class PollResult(NamedTuple):
    """What one poll has received."""

    parts: Sequence[RecordBatch | FetchEvent] = ()
    """In their order; a batch has records of one partition that follow each other."""
    append_times: frozenset[TopicPartition] = frozenset()
    """Partitions whose records have the time of the broker (LogAppendTime), by the first record of each batch."""


_NOTHING = PollResult()


class FetchQueue:
    """The records and events of one client, for the thread that polls it."""

    def __init__(self, client: Any, kafka: KafkaConfig) -> None:
        """Take over the polls of a client that has no partitions yet."""
        self.client = client
        self._kafka = kafka
        self._native: Any = None
        """The queue of the compiled module; None without it, and for a client of a test."""
        if module := native.native_module(kafka):
            with contextlib.suppress(ValueError):
                self._native = module.FetchQueue(client)
        self._to_forward: list[Any] = []
        """Assigned partitions whose records the compiled module does not get yet."""

    def with_client(self, client: Any) -> Self:
        """Return the queue of another client."""
        return type(self)(client, self._kafka)

    def set_sasl_credentials(self, user: str, password: str) -> None:
        self.client.set_sasl_credentials(user, password)

    def assigned(self, partitions: Iterable[Any]) -> None:
        """Take records of these partitions; after each assignment, because the client forgets it."""
        if self._native:
            self._to_forward += partitions

    def poll(self, seconds: float, most_records: int) -> PollResult:
        """Run the client's callbacks, and return what was fetched; wait if that is nothing."""
        if self._to_forward:
            self._forward()
        first = self.client.poll(0 if self._native else seconds)
        if first is not None:  # with the module: records that arrived before their partition was forwarded
            # consume() alone waits until the batch is full; poll() returns with the first record.
            return to_parts([first, *self.client.consume(most_records - 1, 0)])
        found = self._native.consume(most_records, seconds) if self._native else ()
        return _from_columns(found) if found else _NOTHING

    def _forward(self) -> None:
        # A request that returns after the client has stopped these partitions of an earlier assignment: a stop ends the
        # forwarding.
        self.client.assignment()
        for item in self._to_forward:
            self._native.forward(item.topic, item.partition)
        self._to_forward.clear()

    def close(self) -> None:
        """Close the client. It would wait for ever for records that the module has."""
        if self._native:
            self._native.close()
            self._native = None
        self.client.close()


def _from_columns(found: Sequence[Any]) -> PollResult:
    parts: list[RecordBatch | FetchEvent] = []
    append_times: list[TopicPartition] = []
    for code, topic, number, *rest in found:
        partition = TopicPartition(topic, number)
        if code in _OF_NO_INTEREST:
            continue
        if code:
            offset, text = rest
            parts.append(FetchEvent(library.KafkaError(code, text), partition, offset if offset >= 0 else None))
            continue
        is_append_time, *columns = rest
        parts.append(RecordBatch(partition, *columns))
        if is_append_time:
            append_times.append(partition)
    return PollResult(parts, frozenset(append_times))


def to_parts(messages: Sequence[Any]) -> PollResult:
    """Return the client's own objects as columns and events."""
    parts: list[RecordBatch | FetchEvent] = []
    append_times: list[TopicPartition] = []
    for (is_event, topic, number), run in itertools.groupby(messages, _partition_of):
        partition, found = TopicPartition(topic or "", -1 if number is None else number), [*run]
        if is_event:
            parts += [FetchEvent(message.error(), partition, message.offset()) for message in found]
            continue
        parts.append(_to_batch(partition, found))
        if found[0].timestamp()[0] == _APPENDED:
            append_times.append(partition)
    return PollResult(parts, frozenset(append_times))


def _partition_of(message: Any) -> tuple[bool, str | None, int | None]:
    return message.error() is not None, message.topic(), message.partition()


def _to_batch(partition: TopicPartition, messages: Sequence[Any]) -> RecordBatch:
    """Keeping the client's objects instead would cost more than reading all of their headers."""
    keys = [message.key() for message in messages]
    values = [message.value() for message in messages]
    headers = _headers_of(messages)
    return RecordBatch(
        partition,
        [message.offset() for message in messages],
        [message.timestamp()[1] for message in messages],
        keys,
        values,
        headers if any(headers) else None,
        [*map(operator.add, _sizes_of(keys), _sizes_of(values))] if any(keys) else _sizes_of(values),
    )


def _sizes_of(column: Sequence[bytes | None]) -> list[int]:
    try:
        return [*map(len, column)]  # type: ignore[arg-type]
    except TypeError:  # a null
        return [len(data) if data else 0 for data in column]


def _headers_of(messages: Sequence[Any]) -> list[list[Header] | None]:
    """Return the headers of records; a name that is not UTF-8, which the client cannot read, is U+FFFD."""
    try:
        return [*map(_headers, messages)]
    except SystemError:
        return [*map(_readable_headers, messages)]


def _readable_headers(message: Any) -> list[Header]:
    with contextlib.suppress(SystemError):  # then the client has the headers, without such a name
        _headers(message)
    # Reading such a header ends the process.
    parts = [gc.get_referents(header) for header in message.headers() or ()]
    names = [next((part for part in pair if isinstance(part, str)), "\ufffd") for pair in parts]
    values = [next((part for part in pair if isinstance(part, bytes)), None) for pair in parts]
    return list(zip(names, values, strict=True))
