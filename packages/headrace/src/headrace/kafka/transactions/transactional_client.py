"""A client that writes one transaction after the other, until a late request could disturb the next one.

It writes as `ProducerClient` does, by requests, but on the caller's thread.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.client import library
from headrace.kafka.client.error_map import repeat_error, write_error
from headrace.kafka.client.properties import producer_properties
from headrace.kafka.native_client import new_client
from headrace.kafka.polled_client import Refused
from headrace.kafka.write_request import WriteRequest
from headrace.records import Produced
from headrace.runtime import call_within, clock

STATISTICS_SECONDS: Final = 0.02
_STATISTICS_LIMIT_SECONDS: Final = 10.0
_FLUSH_SECONDS: Final = 0.1
BROKEN: Final = (library.KafkaException, SystemError)
"""What the client's calls raise; a SystemError if a fatal error and a delivery report meet in one call."""

_OFFSETS_SECONDS: Final = 10.0
MOST_TRANSACTIONS: Final = 10_000
"""Transactions of one client: its epoch has 16 bits, and the client does not check for their end."""
_SIGNS: Final = {
    "req_timeouts": "a request timed out",
    "txretries": "a request was sent again",
    "disconnects": "a broker closed the connection",
}


_FIRST: Final = "/bootstrap"
"""Ends the names of configured addresses. The client drops them as soon as it knows the brokers, and sends nothing of a
transaction there."""


class _Broker(msgspec.Struct):
    req_timeouts: int = 0
    txretries: int = 0
    disconnects: int = 0
    req: dict[str, int] = {}
    """Requests sent, by kind."""

    @property
    def counters(self) -> tuple[int, ...]:
        """Return what only grows while the client keeps the connection's counters."""
        return self.req_timeouts, self.txretries, self.disconnects, sum(self.req.values())


class _Statistics(msgspec.Struct):
    ts: int
    brokers: dict[str, _Broker]

    @property
    def ends(self) -> int:
        """Requests that ended a transaction."""
        return sum(broker.req.get("EndTxn", 0) for broker in self.brokers.values())


_decode = msgspec.json.Decoder(_Statistics).decode
_UNUSED: Final = _Broker()


def _sign_between(before: _Statistics, latest: _Statistics) -> str:
    """Return the sign of a lost or repeated request between two statistics; empty if there is none.

    A broker that leaves the metadata takes its counters with it, and begins at 0 when it returns.
    """
    for name, new in latest.brokers.items():
        old = before.brokers.get(name, _UNUSED)
        for sign, meaning in _SIGNS.items():
            if getattr(new, sign) > getattr(old, sign):
                return meaning
        if any(now < then for now, then in zip(new.counters, old.counters, strict=True)):
            return "a broker left the cluster and returned"
    gone = before.brokers.keys() - latest.brokers.keys()
    return "a broker left the cluster" if any(not name.endswith(_FIRST) for name in gone) else ""


class TransactionGuard:
    """Reads the statistics of one client, on the thread that polls it. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._before: _Statistics | None = None
        self._latest: _Statistics | None = None
        self._sign = ""
        """The first sign since the transaction began."""
        self._since = float("inf")
        self._transactions = 0

    def observe(self, statistics: str | bytes) -> None:
        """Take the client's statistics: each of them, or counters of a broker that joined and left are missed."""
        before, self._latest = self._latest, _decode(statistics)
        if before and not self._sign:
            self._sign = _sign_between(before, self._latest)

    def opened(self, at: float) -> None:
        """Set when the client was ready for its first transaction; earlier statistics are ignored."""
        self._since = at

    def ended(self, at: float) -> None:
        """Set when a transaction ended."""
        self._since = at
        self._transactions += 1

    @property
    def fresh(self) -> bool:
        """Whether the statistics are younger than the end of the last transaction."""
        return self._latest is not None and self._latest.ts >= self._since * 1_000_000

    def problem(self) -> str:
        """Return why the client must not begin another transaction; empty if it may, as far as is known."""
        if self._before is None or self._latest is None:
            return ""
        if self._transactions >= MOST_TRANSACTIONS:
            return f"it has served {MOST_TRANSACTIONS} transactions"
        if self._sign:
            return self._sign
        return "the end of a transaction was requested twice" if self._latest.ends > self._before.ends + 1 else ""

    def begin(self) -> None:
        """Compare from now on with the current statistics, in which `problem` has found nothing."""
        self._before, self._sign = self._latest, ""


def transactional_properties(kafka: KafkaConfig, settings: ProducerConfig, name: str, seconds: float) -> dict[str, Any]:
    """Return the properties of a client with a name; Kafka aborts a transaction that stays open for `seconds`."""
    return {
        **producer_properties(kafka, settings, f"headrace-{name}"),
        "transactional.id": name,
        "transaction.timeout.ms": int(seconds * 1000),
        "statistics.interval.ms": int(STATISTICS_SECONDS * 1000),
    }


_INNOCENT: Final = (
    library.KafkaError._STATE,
    library.KafkaError._INVALID_DIFFERENT_RECORD,
    library.KafkaError._PURGE_QUEUE,
)


def is_innocent(error: library.KafkaError) -> bool:
    """Return whether a record is not written only because another one is not."""
    return error.code() in _INNOCENT


class NotWritten(NamedTuple):
    """What is reported of a record that is not written, or perhaps not."""

    partition: tuple[str, int]
    error: errors.HeadraceError | None
    """None if it failed only because another record did."""


def _result(
    kafka: KafkaConfig, topic: str, partition: int, offset: int | None, error: library.KafkaError | None, **_: bool
) -> Produced | errors.HeadraceError | NotWritten:
    if error is None:
        return repeat_error(topic, partition) if offset is None else Produced(partition, offset)
    return NotWritten((topic, partition), None if is_innocent(error) else write_error(error, kafka, topic))


class TransactionalClient:
    """One client, used by one thread. After a failure it is closed, because its sequence numbers may have a gap.

    All calls but `has_statistics` and `close` may raise one of `BROKEN`.
    """

    def __init__(self, kafka: KafkaConfig, properties: dict[str, Any], limit_seconds: float) -> None:
        """Open it, which fences its predecessor and so ends the transaction that it left open.

        Raises:
            KafkaException: Kafka refuses, or did not answer in time.
        """
        self._guard = TransactionGuard()
        on_error = properties.get("error_cb", lambda error: None)

        def note_error(error: library.KafkaError) -> None:
            on_error(error)
            if error.fatal():
                raise library.KafkaException(error)

        # It calls nothing that knows this object, so it ends with the last reference, perhaps of a call that hangs.
        own = {**properties, "stats_cb": self._guard.observe}
        self.producer = new_client(kafka, own, note_error, functools.partial(_result, kafka))
        self.producer.transact("init_transactions", limit_seconds)
        self._guard.opened(clock.monotonic())

    def write(self, request: WriteRequest, has_failed: Callable[[], bool]) -> Refused:
        """Take records up to one that is refused; `has_failed` returns whether the transaction can only be aborted."""
        first = flushed = 0
        while refused := self.producer.produce(request, request.records[first:], first, True):
            first, cause = refused
            if not isinstance(cause, BufferError) or first < flushed:
                break
            self.flush(has_failed)  # the transaction has more records than the client's queue
            flushed = first + 1
        return refused

    def flush(self, has_failed: Callable[[], bool]) -> None:
        """Wait until each record is reported. After a failure, drop the records that are still queued.

        Kafka's client sends no record of a transaction that failed: they would wait for `delivery.timeout.ms`.
        """
        while self.producer.flush(_FLUSH_SECONDS):
            if has_failed():
                self.producer.purge(in_flight=False)

    def poll(self, seconds: float) -> None:
        """Read statistics and reports; statistics would fill the memory otherwise."""
        self.producer.poll(seconds)

    def has_statistics(self) -> bool:
        """Wait for statistics that are younger than the last transaction, and return whether there are any."""
        end = clock.monotonic() + _STATISTICS_LIMIT_SECONDS
        with contextlib.suppress(*BROKEN):
            while not self._guard.fresh and clock.monotonic() < end:
                self.poll(STATISTICS_SECONDS)
        return self._guard.fresh

    def problem(self) -> str:
        """Return why the client must not begin another transaction; empty if it may."""
        return self._guard.problem()

    def begin(self) -> None:
        """Begin a transaction, when there are statistics and no problem."""
        self._guard.begin()
        self.producer.transact("begin_transaction")

    def send_offsets(self, offsets: list[Any], member: Any) -> None:
        """Commit offsets of a group in the transaction, within a time limit.

        The client can wait for ever for the coordinator of the group: after its connection closed, or after it left the
        cluster. Source: librdkafka, issues 5456 and 5511.
        """
        of_group = "send_offsets_to_transaction", offsets, member, _OFFSETS_SECONDS
        send = functools.partial(self.producer.transact, *of_group)
        try:
            call_within(_OFFSETS_SECONDS + 1, send)
        except TimeoutError as cause:
            timed_out = library.KafkaError(library.KafkaError._TIMED_OUT, str(cause))
            raise library.KafkaException(timed_out) from cause

    def commit(self) -> None:
        """Commit the transaction. If this raises, it may still have been committed, and must not be aborted."""
        self.producer.transact("commit_transaction")
        self._guard.ended(clock.monotonic())

    def close(self) -> None:
        """Drop the client without an abort, which could be wrong after a commit in doubt."""
        self.producer.purge()
