"""Certificates and secrets that change on disk: tried first, and then used by every client of the cluster.

One thread per cluster looks at the files (`BrokerProbe`). It connects its own client with what they contain now.
Once a broker has answered that client, the others follow, each on the thread that owns it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import FileProblem, KafkaSecurity
from headrace.config.references import FileChanges, ReferenceProblem
from headrace.errors import HeadraceError
from headrace.kafka.client import library
from headrace.runtime import Clock, LoopBridge

log = logging.getLogger(__name__)

C = TypeVar("C")


class SecurityFiles:
    """The files of `kafka.security`, for the one thread that looks at them."""

    def __init__(self, kafka: KafkaConfig, clock: Clock) -> None:
        """Read the files; the check at the start reports those that are not usable."""
        self._kafka = kafka
        self._clock = clock
        self._changes = FileChanges(kafka.security.files)
        self._look_at = clock.monotonic() + FileChanges.LOOK_SECONDS
        self._is_new = False
        """Whether the files contain something that is not in use."""
        if kafka.security.files and kafka.security.in_use is kafka.security:
            try:
                kafka.security.use(kafka.security.current())
            except (ReferenceProblem, FileProblem) as problem:
                log.debug("kafka.security: %s", problem)

    @property
    def due(self) -> bool:
        """Whether it is time to look."""
        return self._clock.monotonic() >= self._look_at

    def look(self, attempt: Callable[[KafkaConfig], C], *, refused: bool = False) -> C | None:
        """Use changed files if a broker accepts their content; retry rejected ones when it is due.

        Args:
            attempt: Returns a client that a broker has answered; raises an error if none has.
            refused: Whether brokers refuse what is in use.

        Returns:
            That client, if there are changes and they are in use now.
        """
        security, changed, due = self._kafka.security, self._changes.found(), self.due
        if due:
            self._look_at = self._clock.monotonic() + FileChanges.LOOK_SECONDS
        if not changed and not (due and self._is_new):
            return None
        try:
            current = security.current()
            self._is_new = current != security.in_use
            client = attempt(self._kafka.model_copy(update={"security": current})) if self._is_new else None
        except (ReferenceProblem, HeadraceError, library.KafkaException) as cause:
            self._is_new = True
            if changed:
                why = cause.args[0].str() if isinstance(cause, library.KafkaException) else cause
                log.warning(
                    "kafka.security: the changed files were rejected; keeping the old ones, will retry: %s", why
                )
            return None
        if client is not None:
            self._is_new = False
            security.use(current, after_refusal=refused)
            log.info("kafka.security: changed files are in use")
        return client


class ClientSecurity(Generic[C]):
    """The security settings of one client, compared with those in use; for the thread that owns the client."""

    def __init__(self, security: KafkaSecurity, make: Callable[[], C]) -> None:
        """Take what is in use, before `make` makes the client, or its properties, for the first time."""
        self.make = make
        self._security = security
        self._made_with = security.in_use
        self.is_expired = False
        """Whether the client cannot continue: Kafka refuses something, and that is fatal to it."""

    def must_replace(self, client: Any) -> bool:
        """Return whether a client must be replaced; if only the password has changed, the client gets it instead."""
        now = self._security.in_use
        before = self._made_with
        if now is before and not self.is_expired:
            return False
        self._made_with = now
        if self.is_expired or not _only_password_differs(now, before):
            return True
        assert now.sasl
        client.set_sasl_credentials(now.sasl.username, now.sasl.password.get_secret_value())
        return False

    def replacement(self, client: C) -> C | None:
        """Return a new client if one must be replaced; the old one stays in use if none can be made."""
        if not self.must_replace(client):
            return None
        try:
            client = self.make()
        except library.KafkaException as cause:
            log.warning("kafka.security: keeping the old credentials of a client: %s", cause.args[0].str().strip())
            return None
        self.is_expired = False
        return client


class ClientReplacement(ClientSecurity[C]):
    """The replacement of a producer's client: the new one gets nothing before the old one is empty."""

    def __init__(self, security: KafkaSecurity, make: Callable[[], C]) -> None:
        super().__init__(security, make)
        self.waiting: list[Any] | None = None
        """What waits for the new client; None while the current one is used."""
        self._next: C | None = None
        self._ends = False
        self._bridge: LoopBridge[C] | None = None

    def open(
        self, name: str, loop: asyncio.AbstractEventLoop, use: Callable[[C, list[Any]], None], wake: Callable[[], Any]
    ) -> None:
        """Begin: `use` gets a new client with what waits for it, on the loop; `wake` wakes the client's thread."""

        def step(_clients: list[C]) -> None:
            if self.waiting is None:
                self.waiting = []
            elif self._next is not None:
                waiting, self.waiting = self.waiting, None
                client, self._next = self._next, None
                self._ends = False
                use(client, waiting)
                log.info("%s: its client was replaced, because files of kafka.security have changed", name)
            wake()

        self._bridge = LoopBridge(loop, step)

    def advance(self, client: Any) -> bool:
        """Return whether a client must only be flushed, because it will be replaced; on the client's thread."""
        assert self._bridge
        if self._next is None:
            self._next = self.replacement(client)
            if self._next is not None:
                self._bridge.post(self._next)
        elif self.waiting is not None and not self._ends and not len(client):
            self._ends = True  # its records are acknowledged, or have failed at their time limit
            self._bridge.post(self._next)
        elif self.waiting is not None and self._security.after_refusal:
            client.purge(in_flight=False)  # what waits for a connection would only fail at its time limit
        return self._next is not None and not self._ends

    def stop(self) -> list[Any]:
        """Return what waits, and keep the current client; on the loop."""
        waiting = self.waiting or []
        self.waiting = self._next = None
        return waiting


def _only_password_differs(now: KafkaSecurity, before: KafkaSecurity) -> bool:
    """Return whether a client can keep its connection: its user has the same name and rights."""
    if not now.sasl or not before.sasl or now.sasl.oauth:
        return False
    return now == before.model_copy(update={"sasl": before.sasl.model_copy(update={"password": now.sasl.password})})
