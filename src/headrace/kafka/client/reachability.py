"""Whether a cluster answers, since when it does not, and why: for all clients of a process.

A client of its own asks for the metadata of one topic while no other client has had a response for a second. It is a
consumer's client, because that creates no topics, and its question goes to any broker: the questions of an
administrative client go to the controller, which may be the broker that is down. Source: librdkafka,
`rd_kafka_metadata`.
"""

import logging
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka.client.connection_errors import ConnectionErrors, ConnectionProblem
from headrace.kafka.client.credentials import SecurityFiles
from headrace.kafka.client.properties import client_properties
from headrace.runtime import Clock, OwnedThread, Readiness, Service

log = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0
_RETRY_SECONDS = 0.5
_LIMIT_SECONDS = 3.0
_ATTEMPT_SECONDS = 1.0
_LATE_SECONDS = 1.0
"""For so long after the start of an outage, a response may belong to an earlier question."""
_TOPIC = "_headrace-reachability"  # need not exist
_POLL_SECONDS = 0.05
_FIRST_REMINDER_SECONDS = 10.0
_LONGEST_REMINDER_SECONDS = 600.0
_THREAD_STOP_SECONDS = 5.0
_PORT = re.compile(r":\d+$")
_SILENT = ConnectionProblem("neither a response nor an error arrived")
_Error = confluent_kafka.KafkaError


class Outage(NamedTuple):
    """A time in which no broker answers."""

    since: float
    """Of the last response, in seconds since the epoch; of the start of the process if there was none."""
    seconds: float
    """How long it lasts."""
    why: str
    """One sentence: the address, since when, and the client's reason."""


class _Unanswered(NamedTuple):
    """The present outage, as reported so far."""

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
        """The addresses, as they are configured."""
        self.label = name.removeprefix("kafka").strip() or self.servers
        """Names the cluster in metrics: its addresses, and with another login on them who has it."""
        self._kafka = kafka
        self._files = SecurityFiles(kafka, clock)
        self._clock = clock
        self._report = report or log.warning
        self._answered_at = clock.monotonic()
        self._has_answered = False
        self._unanswered: _Unanswered | None = None
        """The present outage; None while a broker answers, or while that is not known."""
        self._errors = ConnectionErrors(kafka)
        self._refused_requests = 0
        self._none_left = threading.Event()
        """Set when a client reports that it reaches no broker, so that the brokers are tried at once."""
        self._own_none_left = False
        self._seen_alive = threading.Event()
        """Set when another client gets a response during an outage."""
        self._thread: OwnedThread | None = None

    async def start(self) -> None:
        self.publish("headrace_kafka_up", lambda: int(not self.must_ask), bootstrap_servers=self.label)
        self._thread = OwnedThread(self.name, self._watch, self.die)
        self._thread.start()

    async def stop(self) -> None:
        if self._thread:
            await self._thread.stop(_THREAD_STOP_SECONDS)
        await super().stop()

    def readiness(self) -> Readiness:
        if outage := self.outage:
            return Readiness(False, outage.why)
        return Readiness(
            self._has_answered, "" if self._has_answered else f"Kafka at {self.servers} has not answered yet"
        )

    @property
    def outage(self) -> Outage | None:
        """The present outage; None while a broker answers, or while that is not known yet."""
        unanswered = self._unanswered
        if not unanswered:
            return None
        seconds = self._clock.monotonic() - self._answered_at
        since = self._clock.time() - seconds
        return Outage(
            since,
            seconds,
            f"Kafka at {self.servers} has not answered for {seconds:.0f} s: {unanswered.problem}{self.hint()}",
        )

    def answered(self) -> None:
        """Record that a broker has just answered a client."""
        now, unanswered = self._clock.monotonic(), self._unanswered
        if not unanswered:
            self._answered_at, self._has_answered = now, True
        elif now - unanswered.began_at > _LATE_SECONDS:
            self._seen_alive.set()

    def failed(self, error: Any) -> None:
        """Take an error that a client reports outside its calls (`error_cb`)."""
        self._errors.take(error)
        if error.code() == _Error._ALL_BROKERS_DOWN:
            self._none_left.set()  # of that client only

    def check(self, limit_seconds: float, doing: str = "nothing of this request was sent") -> None:
        """Raise KafkaUnavailable if no broker has answered for longer than a limit, or all refuse the client."""
        unanswered = self._unanswered
        if not unanswered:
            return
        outage = self.outage
        if outage and (unanswered.problem.refused or outage.seconds > limit_seconds):
            self._refused_requests += 1
            if self._refused_requests == 1:
                log.warning("requests are answered 503 until Kafka at %s answers", self.servers)
            raise self.error(doing)

    def error(self, doing: str) -> KafkaUnavailable:
        """Return the error of what cannot be done now."""
        why = outage.why if (outage := self.outage) else f"Kafka at {self.servers} has not answered yet"
        return KafkaUnavailable(f"{doing}: {why}", bootstrap_servers=self.servers)

    @property
    def must_ask(self) -> bool:
        """Whether no broker has answered yet, or none answers now."""
        return not self._has_answered or self._unanswered is not None

    def problem(self, *, contact: bool = False) -> ConnectionProblem | None:
        """Return why no broker is reached, if a client has reported it; with `contact` a broker may be contacted."""
        return self._errors.find() if contact else self._errors.last()

    def hint(self) -> str:
        """Return what to do about an address that looks wrong, as the end of a sentence; empty if none does."""
        bare = [one for one in self.servers.split(",") if not _PORT.search(one.strip())]
        return f" ({bare[0].strip()} names no port, so 9092 is taken)" if bare else ""

    # On the thread ---------------------------------------------------------------------------------------------------

    def _watch(self, stop_requested: threading.Event) -> None:
        client = self._new_client(self._kafka, self._own_failed)
        try:
            while not stop_requested.is_set():
                started_at = self._clock.monotonic()
                answered = self._ask(client, stop_requested)
                if not stop_requested.is_set():
                    self.record_attempt(started_at, answered)
                self._wait(client, stop_requested)
                refused = bool(self._unanswered and self._unanswered.problem.refused)
                if (self._files.due or refused) and (renewed := self._files.look(self._connect, refused=refused)):
                    client.close()
                    client = renewed
        finally:
            client.close()

    def _new_client(self, kafka: KafkaConfig, failed: Callable[[Any], None]) -> confluent_kafka.Consumer:
        own: dict[str, Any] = {
            "group.id": "headrace.reachability",  # required by the client; never joined
            "allow.auto.create.topics": False,
            "reconnect.backoff.max.ms": 500,
            "socket.timeout.ms": int(_ATTEMPT_SECONDS * 1000),  # then another broker is tried
            "fetch.wait.max.ms": 0,  # it never fetches; the client warns of more, with so short a time for a response
            "error_cb": failed,
        }
        return confluent_kafka.Consumer({**client_properties(kafka, "headrace-reachability"), **own})

    def _connect(self, kafka: KafkaConfig) -> confluent_kafka.Consumer:
        """Return a client with changed security that a broker has answered."""
        errors = ConnectionErrors(kafka)
        reports: list[Callable[[Any], None]] = [errors.take]
        client = self._new_client(kafka, lambda error: reports[-1](error))
        try:
            client.list_topics(_TOPIC, timeout=_LIMIT_SECONDS)
        except confluent_kafka.KafkaException as cause:
            client.poll(0)  # serves the errors
            client.close()
            raise KafkaUnavailable(str(errors.find() or cause.args[0].str())) from cause
        reports.append(self._own_failed)
        return client

    def record_attempt(self, started_at: float, answered: bool) -> None:
        """Take the result of a question to the brokers: start an outage, remind of it, or end it."""
        now = self._clock.monotonic()
        outage = self.outage
        if answered:
            self._has_answered, self._unanswered = True, None
            self._errors.clear()
            self._answered_at = now
            if outage:
                refused = f"; {self._refused_requests} requests were answered 503" if self._refused_requests else ""
                self._report(f"Kafka at {self.servers} answers again after {outage.seconds:.0f} s{refused}")
            self._refused_requests = 0
        elif self._answered_at <= started_at or outage:  # else another client has had a response meanwhile
            problem, known = self._errors.find() or _SILENT, self._unanswered
            named_refusal = problem.refused or bool(known and known.named_refusal)
            if known and now < known.remind_at and named_refusal == known.named_refusal:
                self._unanswered = known._replace(problem=problem)
                return
            pause = min(3 * known.pause_seconds, _LONGEST_REMINDER_SECONDS) if known else _FIRST_REMINDER_SECONDS
            self._unanswered = _Unanswered(problem, known.began_at if known else now, now + pause, pause, named_refusal)
            self._report(self.outage.why if self.outage else "")

    def _ask(self, client: confluent_kafka.Consumer, stop_requested: threading.Event) -> bool:
        """Ask any broker; ask again only if the client reports that it reaches none."""
        end = self._clock.monotonic() + _LIMIT_SECONDS
        self._none_left.clear()
        self._seen_alive.clear()
        self._own_none_left = False
        while not stop_requested.is_set():
            try:
                client.list_topics(_TOPIC, timeout=_ATTEMPT_SECONDS)
            except confluent_kafka.KafkaException:
                client.poll(0)  # serves `_own_failed`
                if not self._seen_alive.is_set() and (self._own_none_left or self._clock.monotonic() >= end):
                    return False
            else:
                return True
            if self._seen_alive.is_set():
                return True
        return False

    def _wait(self, client: confluent_kafka.Consumer, stop_requested: threading.Event) -> None:
        """Wait until the next attempt is due."""
        began = self._clock.monotonic()
        while not stop_requested.is_set():
            now = self._clock.monotonic()
            if self._files.due:
                return
            if self._unanswered:
                if now - began >= _RETRY_SECONDS:
                    return
            elif self._none_left.is_set() or now - self._answered_at >= _IDLE_SECONDS:
                return
            client.poll(_POLL_SECONDS)

    def _own_failed(self, error: Any) -> None:
        self._own_none_left = self._own_none_left or error.code() == _Error._ALL_BROKERS_DOWN
        self.failed(error)
