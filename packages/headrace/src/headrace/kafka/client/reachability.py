"""Whether a cluster answers, since when it does not, and why: for all clients of a process.

A separate client requests the metadata of one topic when no other client has had a response for a second. It is a
consumer's client, because that creates no topics, and its requests go to any broker. Those of an administrative client
go to the controller, which may be the broker that is down. Source: librdkafka, `rd_kafka_metadata`.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka.client import library
from headrace.kafka.client.connection_errors import ConnectionErrors, ConnectionProblem
from headrace.kafka.client.credentials import SecurityFiles
from headrace.kafka.client.properties import client_properties
from headrace.runtime import Clock, OwnedThread, Readiness, Service, blocking
from headrace.runtime.tls import certificate_end

log = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0
_MEASURE_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_LIMIT_SECONDS = 3.0
_ATTEMPT_SECONDS = 1.0
_LATE_SECONDS = 1.0
"""For this long after the start of an outage, a response may belong to an earlier request."""
_TOPIC = "_headrace-reachability"  # need not exist
_POLL_SECONDS = 0.05
_FIRST_REMINDER_SECONDS = 10.0
_LONGEST_REMINDER_SECONDS = 600.0
_THREAD_STOP_SECONDS = 5.0
_SILENT = ConnectionProblem("neither a response nor an error arrived")
_Error = library.KafkaError


class Outage(NamedTuple):
    """A time in which no broker answers."""

    since: float
    """Of the last response, in seconds since the epoch; of the start of the process if there was none."""
    seconds: float
    """How long it has lasted."""
    why: str
    """One sentence: the address, since when, and the client's reason."""


class _Unanswered(NamedTuple):
    """The current outage, as reported so far."""

    problem: ConnectionProblem
    began_at: float
    remind_at: float
    pause_seconds: float
    """Until the reminder after the next."""
    named_refusal: bool
    """Whether it was reported that the brokers refuse the client."""


class Reachability(Service):
    """Whether one cluster answers. Every client reports to it, from any thread."""

    def __init__(
        self, kafka: KafkaConfig, clock: Clock, name: str = "kafka", report: Callable[[str], None] | None = None
    ) -> None:
        """Prepare; `report` gets a sentence when an outage begins, lasts and ends, which is logged by default."""
        super().__init__(name)
        self.servers = kafka.bootstrap_servers
        """The configured addresses."""
        self.label = name.removeprefix("kafka").strip() or self.servers
        """Names the cluster in metrics: its addresses, or the service whose login to it differs."""
        self.answered_at = clock.monotonic()
        """When a broker last answered a client, by the monotonic clock."""
        self.probe = BrokerProbe(kafka, clock, self)
        """What asks the brokers when no other client does."""
        self._security = kafka.security
        self._clock = clock
        self._report = report or log.warning
        self.has_answered = False
        """Whether a broker has ever answered a client of this process."""
        self._unanswered: _Unanswered | None = None
        """The current outage; None while a broker answers, or while that is not known."""
        self._errors = ConnectionErrors(kafka)
        self._thread: OwnedThread | None = None

    async def start(self) -> None:
        self.publish("headrace_kafka_up", lambda: int(self.is_reachable), bootstrap_servers=self.label)
        self.publish("headrace_kafka_round_trip_seconds", lambda: self.probe.round_trip, bootstrap_servers=self.label)
        self._publish_certificate()
        self._thread = OwnedThread(self.name, self.probe.run, self.die)
        self._thread.start()

    async def stop(self) -> None:
        if self._thread:
            await self._thread.stop(_THREAD_STOP_SECONDS)
        await super().stop()

    def _publish_certificate(self) -> None:
        security = self._security

        def end() -> float:
            tls = security.in_use.tls
            return certificate_end(tls.certificate.encode()) if tls else float("nan")

        if security.tls and (security.tls.certificate or security.tls.keystore):
            setting = "kafka.security.tls" if self.label == self.servers else f"{self.label} tls"
            self.publish("headrace_certificate_expires_seconds", end, setting=setting)

    def readiness(self) -> Readiness:
        if outage := self.outage:
            return Readiness(False, outage.why)
        return Readiness(
            self.has_answered, "" if self.has_answered else f"Kafka at {self.servers} has not answered yet"
        )

    @property
    def outage(self) -> Outage | None:
        """The current outage; None while a broker answers, or while that is not known yet."""
        unanswered = self._unanswered
        if not unanswered:
            return None
        seconds = self._clock.monotonic() - self.answered_at
        since = self._clock.time() - seconds
        return Outage(
            since, seconds, f"Kafka at {self.servers} has not answered for {seconds:.0f} s: {unanswered.problem}"
        )

    def answered(self) -> None:
        """Record that a broker has just answered a client."""
        now = self._clock.monotonic()
        unanswered = self._unanswered
        if not unanswered:
            self.answered_at = now
            self.has_answered = self._errors.has_answered = True
        elif now - unanswered.began_at > _LATE_SECONDS:
            self.probe.seen_alive.set()

    def failed(self, error: Any) -> None:
        """Take an error that a client reports outside its calls (`error_cb`)."""
        self._errors.take(error)
        if error.code() == _Error._ALL_BROKERS_DOWN:
            self.probe.none_left.set()  # of that client only

    def check(self, limit_seconds: float, doing: str = "nothing of this request was sent") -> None:
        """Raise KafkaUnavailable if no broker has answered for longer than a limit, or all refuse the client."""
        unanswered = self._unanswered
        if not unanswered:
            return
        outage = self.outage
        if outage and (unanswered.problem.refused or outage.seconds > limit_seconds):
            raise self.error(doing)

    def error(self, doing: str) -> KafkaUnavailable:
        """Return the error for what cannot be done now."""
        why = outage.why if (outage := self.outage) else f"Kafka at {self.servers} has not answered yet"
        return KafkaUnavailable(f"{doing}: {why}", bootstrap_servers=self.servers)

    @property
    def is_reachable(self) -> bool:
        """Whether a broker has answered, and no outage is known."""
        return self.has_answered and self._unanswered is None

    @property
    def is_down(self) -> bool:
        """Whether there is an outage now."""
        return self._unanswered is not None

    @property
    def is_refused(self) -> bool:
        """Whether there is an outage in which the brokers refuse the client."""
        unanswered = self._unanswered
        return unanswered is not None and unanswered.problem.refused

    @property
    def no_listener(self) -> bool:
        """Whether clients report that no broker listens."""
        return self._errors.no_listener

    def problem(self) -> ConnectionProblem | None:
        """Return why no broker is reached, if a client has reported it."""
        return self._errors.last()

    def record_attempt(self, started_at: float, answered: bool) -> None:
        """Take the result of a request to the brokers: start an outage, repeat its report, or end it."""
        now = self._clock.monotonic()
        outage = self.outage
        if answered:
            self.has_answered = True
            self._unanswered = None
            self._errors.clear()
            self.answered_at = now
            if outage:
                self._report(f"Kafka at {self.servers} answers again after {outage.seconds:.0f} s")
        elif self.answered_at <= started_at or outage:  # otherwise another client has had a response meanwhile
            problem = self._errors.last() or _SILENT
            known = self._unanswered
            named_refusal = problem.refused or bool(known and known.named_refusal)
            if known and now < known.remind_at and named_refusal == known.named_refusal:
                self._unanswered = known._replace(problem=problem)
                return
            pause = min(3 * known.pause_seconds, _LONGEST_REMINDER_SECONDS) if known else _FIRST_REMINDER_SECONDS
            self._unanswered = _Unanswered(problem, known.began_at if known else now, now + pause, pause, named_refusal)
            self._report(self.outage.why if self.outage else "")


class BrokerProbe:
    """Asks any broker, on a thread, when no client has had a response for a second; uses changed files of security."""

    def __init__(self, kafka: KafkaConfig, clock: Clock, reachability: Reachability) -> None:
        self.none_left = blocking.Event()
        """Set when a client reports that it reaches no broker, so that the brokers are tried at once."""
        self.seen_alive = blocking.Event()
        """Set when another client gets a response during an outage."""
        self.round_trip = float("nan")
        """Duration of the last request that a broker answered, in seconds."""
        self._kafka = kafka
        self._clock = clock
        self._reachability = reachability
        self._files = SecurityFiles(kafka, clock)
        self._own_none_left = False

    def run(self, stop_requested: blocking.Event) -> None:
        """Report to the reachability until the stop is requested."""
        client = self._new_client(self._kafka, self._own_failed)
        try:
            while not stop_requested.is_set():
                started_at = self._clock.monotonic()
                answered = self._request(client, stop_requested)
                if not stop_requested.is_set():
                    self._reachability.record_attempt(started_at, answered)
                self._wait(client, stop_requested)
                refused = self._reachability.is_refused
                if (self._files.due or refused) and (renewed := self._files.look(self._connect, refused=refused)):
                    client.close()
                    client = renewed
        finally:
            client.close()

    def _new_client(self, kafka: KafkaConfig, failed: Callable[[Any], None]) -> library.Consumer:
        own: dict[str, Any] = {
            "group.id": "headrace.reachability",  # required by the client; never joined
            "allow.auto.create.topics": False,
            "reconnect.backoff.max.ms": 500,
            "socket.timeout.ms": int(_ATTEMPT_SECONDS * 1000),  # then another broker is tried
            "fetch.wait.max.ms": 0,  # it never fetches; the client warns of more, with so short a time for a response
            "error_cb": failed,
        }
        return library.Consumer({**client_properties(kafka, "headrace-reachability"), **own})

    def _connect(self, kafka: KafkaConfig) -> library.Consumer:
        """Return a client with changed security that a broker has answered."""
        errors = ConnectionErrors(kafka)
        errors.has_answered = self._reachability.has_answered
        reports: list[Callable[[Any], None]] = [errors.take]
        client = self._new_client(kafka, lambda error: reports[-1](error))
        try:
            client.list_topics(_TOPIC, timeout=_LIMIT_SECONDS)
        except library.KafkaException as cause:
            client.poll(0)  # serves the errors
            client.close()
            raise KafkaUnavailable(str(errors.last() or cause.args[0].str())) from cause
        reports.append(self._own_failed)
        return client

    def _request(self, client: library.Consumer, stop_requested: blocking.Event) -> bool:
        """Return whether a broker answers; give up early only if the client reports that it reaches none."""
        end = self._clock.monotonic() + _LIMIT_SECONDS
        self.none_left.clear()
        self.seen_alive.clear()
        self._own_none_left = False
        while not stop_requested.is_set():
            sent_at = self._clock.monotonic()
            try:
                client.list_topics(_TOPIC, timeout=_ATTEMPT_SECONDS)
            except library.KafkaException:
                client.poll(0)  # serves `_own_failed`
                if not self.seen_alive.is_set() and (self._own_none_left or self._clock.monotonic() >= end):
                    return False
            else:
                self.round_trip = self._clock.monotonic() - sent_at
                return True
            if self.seen_alive.is_set():
                return True
        return False

    def _wait(self, client: library.Consumer, stop_requested: blocking.Event) -> None:
        """Wait until the next attempt is due."""
        began = self._clock.monotonic()
        measure_at = began + _MEASURE_SECONDS
        while not stop_requested.is_set():
            now = self._clock.monotonic()
            if self._files.due:
                return
            if self._reachability.is_down:
                if now - began >= _RETRY_SECONDS:
                    return
            elif self.none_left.is_set() or now >= min(self._reachability.answered_at + _IDLE_SECONDS, measure_at):
                return
            client.poll(_POLL_SECONDS)

    def _own_failed(self, error: Any) -> None:
        self._own_none_left = self._own_none_left or error.code() == _Error._ALL_BROKERS_DOWN
        self._reachability.failed(error)
