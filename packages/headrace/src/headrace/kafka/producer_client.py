"""The client of a producer, and when another one replaces it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from headrace import errors
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.admin import Admin
from headrace.kafka.client import library
from headrace.kafka.client.access import is_refused, principal_of
from headrace.kafka.client.credentials import ClientReplacement
from headrace.kafka.client.error_map import refusal_error, repeat_error, report_error, write_error
from headrace.kafka.client.properties import client_log, producer_properties
from headrace.kafka.native_client import NativeClient, new_client
from headrace.kafka.polled_client import PolledClient
from headrace.kafka.write_request import ProduceResult, WriteRequest
from headrace.records import NO_OFFSET, OutgoingRecord, Produced
from headrace.runtime import LoopBridge, OwnedThread, blocking, clock

Part = tuple[WriteRequest, Sequence[OutgoingRecord], int]
"""Records of a request, and the index of the first of them in it."""

_POLL_SECONDS = 0.1
_STOP_SECONDS = 5.0
_REFUSED_SECONDS, _IDLE_REFUSED_SECONDS = 1.0, 30.0
"""Seconds until a client without any right to write is replaced: with records that wait, and without."""
_BACKOFF_MS = 5
_client_numbers = itertools.count(1)


class _Health:
    """The state of one client."""

    def __init__(self) -> None:
        self.fatal = False
        """Whether it must be replaced."""
        self.has_written = False
        self.refusal: library.KafkaError | None = None
        """Kafka's response to a client that may write to no topic: it never sends a record."""


class ProducerClient:
    """Hands records to a client on the loop, and takes care of the client on a thread.

    The client is replaced after a fatal error, and when files of `kafka.security` have changed.
    """

    def __init__(
        self,
        name: str,
        admin: Admin,
        settings: ProducerConfig,
        bridge: LoopBridge[WriteRequest],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Open a client.

        `bridge` takes the requests whose results are all known; `on_death` is called on its loop if reports cannot be
        taken any more.
        """
        # Settings
        self._name = name
        self._admin = admin
        self._settings = settings
        # For good
        self._bridge = bridge
        self._on_death = on_death
        self._work = blocking.Event()
        self._replacement = ClientReplacement(admin.config.security, self._new_client)
        self._thread: OwnedThread | None = None
        """None until the start."""
        self._logged = ""
        """The last sentence about a client that may not write."""
        # For one client
        self._health = _Health()
        self._client = self._new_client()
        self._outdated: PolledClient | NativeClient | None = None
        """The one before, if it is empty and not yet closed."""

    @property
    def problem(self) -> str:
        """What the client may not do; empty if it may write."""
        return self._logged if self._health.refusal else ""

    @property
    def is_running(self) -> bool:
        """Whether its thread takes reports."""
        return self._thread is not None and not self._thread.stop_requested.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._client.open(self._on_death)
        self._replacement.open(self._name, self._bridge.loop, self._use, self._work.set)
        self._thread = OwnedThread(self._name, self._serve, self._on_death)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread. Each queued record gets a report: unknown if in flight, else not written."""
        if self._thread:
            for waiting in self._replacement.stop():
                self.take(*waiting)
            self._client.purge()
            self._thread.stop_requested.set()
            self._work.set()  # after the request, so that the thread does not wait again
            await self._thread.stop(_STOP_SECONDS)

    def take(
        self, request: WriteRequest, records: Sequence[OutgoingRecord], first: int = 0, *, at_once: bool = False
    ) -> None:
        """Give the client the records of a request from index `first` on; refuse those that it does not take.

        With `at_once` they are sent before `linger.ms` is over: no other request would fill their batch.
        """
        if self._replacement.waiting is not None:
            self._replacement.waiting.append((request, records, first))
            return
        end = first + len(records)
        while refused := self._client.produce(request, records, first, at_once):
            at, cause = refused
            request.refuse(at, self._refusal(cause, records[at - first].topic))
            records, first = records[at + 1 - first :], at + 1
            if first == end:
                break

    def _refusal(self, cause: Exception, topic: str) -> errors.HeadraceError:
        """Return the error for a record that the client did not take, so it is certainly not written."""
        error = refusal_error(cause, self._admin.config, topic, self._health.refusal)
        if not isinstance(error, errors.FatalKafkaError):
            return error
        self._health.fatal = True
        self._work.set()
        return errors.KafkaUnavailable("the Kafka client is being replaced: send this record again")

    def written(self) -> None:
        """Record that the client has written a record, so it has the right to."""
        self._health.has_written = True

    def _result(
        self,
        topic: str,
        partition: int,
        offset: int | None,
        error: library.KafkaError | None,
        *,
        perhaps_written: bool = True,
    ) -> ProduceResult:
        """Return the result for a report."""
        if error is None and offset is not None:
            return Produced(partition, offset)
        if error is None:
            return repeat_error(topic, partition) if self._settings.acks != 0 else Produced(partition, NO_OFFSET)
        if self._health.refusal:  # so this record was never sent
            return write_error(self._health.refusal, self._admin.config, topic)
        return report_error(error, topic, self._admin.config, perhaps_written=perhaps_written)

    def _serve(self, stop_requested: blocking.Event) -> None:
        while not stop_requested.is_set():
            self._replacement.advance(self._client)
            self._client.serve(self._work, _POLL_SECONDS)
            if self._outdated:
                self._outdated.close(0.0)
                self._outdated = None
            if self._health.refusal:
                self._wait_for_rights(stop_requested)
            if self._health.fatal:
                self._replace_client()
        self._client.close(_STOP_SECONDS / 2)

    def _wait_for_rights(self, stop_requested: blocking.Event) -> None:
        """Wait until another client may get the right to write: a moment, or longer while no record waits."""
        stop_requested.wait(_REFUSED_SECONDS)
        self._work.clear()
        end = clock.monotonic() + _IDLE_REFUSED_SECONDS
        while not (
            len(self._client) or self._replacement.waiting or stop_requested.is_set() or clock.monotonic() > end
        ):
            if self._work.wait(_POLL_SECONDS):
                break

    def _use(self, client: PolledClient | NativeClient, waiting: Sequence[Part]) -> None:
        """Continue with a new client; on the loop."""
        self._outdated, self._client = self._client, client
        client.open(self._on_death)
        for part in waiting:
            self.take(*part)

    def _replace_client(self) -> None:
        # Fatal errors of librdkafka are final. The records of the old client get reports that mean "unknown".
        old, self._client = self._client, self._new_client()
        self._client.open(self._on_death)
        old.purge()
        old.close(_STOP_SECONDS)
        self._health = _Health()

    def _note_error(self, error: library.KafkaError) -> None:
        self._admin.reachability.failed(error)
        health = self._health
        if error.fatal() and is_refused(error) and not health.has_written:
            health.fatal, health.refusal = True, error
            principal = principal_of(self._admin.config)[0]
            problem = f"{principal} has no right Write on any topic, so every record is refused until it has one"
            if problem != self._logged:
                client_log.warning("producer %s: %s", self._name, problem)
            self._logged = problem
        elif error.fatal():
            client_log.error("producer %s is replaced after a fatal error: %s", self._name, error.str())
            health.fatal = True
        if health.fatal:
            self._work.set()

    def _new_client(self) -> PolledClient | NativeClient:
        client_id = f"headrace-{self._name}-{next(_client_numbers)}"
        properties = producer_properties(self._admin.config, self._settings, client_id)
        if self._settings.batch_bytes == 1:
            properties["retry.backoff.ms"] = _BACKOFF_MS  # a refused record repeats what is in flight behind it
        return new_client(self._admin.config, properties, self._note_error, self._result, bridge=self._bridge)
