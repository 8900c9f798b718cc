"""Says when everything is ready, and until then why not: to the log, to standard output and to systemd."""

import logging
import re
from collections.abc import Callable

from headrace.kafka import hanging_consumers
from headrace.runtime import Clock, Deadline, Service, Supervisor
from headrace.runtime.notification import Notifications
from headrace.runtime.process_link import ProcessLink

log = logging.getLogger(__name__)

_READY_CHECK_SECONDS = 0.1
_READY_ATTEMPTS = 10
_FIRST_LOG_SECONDS = 2.0
_NEXT_LOG_SECONDS = 15.0
_LONGEST_PAUSE_SECONDS = 600.0
_NUMBER = re.compile(r"\d+")


class ReadyAnnouncer(Service):
    """Announces once that everything in the file is ready, and tells the service manager what the process does."""

    def __init__(
        self, supervisor: Supervisor, clock: Clock, announce: Callable[[], None], manager: Notifications | ProcessLink
    ) -> None:
        super().__init__("announcer")
        self._supervisor = supervisor
        self._clock = clock
        self._announce = announce
        self._manager = manager

    async def start(self) -> None:
        self.spawn(self._wait(), "wait")
        if self._manager.watchdog_seconds:
            self.keep(self._report_alive, "watchdog")

    async def drain(self, deadline: Deadline) -> None:
        self._manager.send(STOPPING="1", STATUS="draining")

    async def _report_alive(self) -> None:
        """Send that this process is alive, as liveness says it, from the loop."""
        while True:
            if not hanging_consumers():
                self._manager.send(WATCHDOG="1")
            await self._clock.sleep(self._manager.watchdog_seconds / 2)

    async def _wait(self) -> None:
        started_at = self._clock.monotonic()
        next_log, pause, logged, known = started_at + _FIRST_LOG_SECONDS, _NEXT_LOG_SECONDS, "", ""
        while waits := {name: one.reason for name, one in self._supervisor.readiness().items() if not one.ready}:
            text = "; ".join(f"{name}: {reason}" for name, reason in waits.items())
            reasons = _NUMBER.sub("", text)  # the length of an outage grows, and the reason is the same
            if reasons != known:
                self._manager.send(STATUS=f"not ready yet: {text}")
                known = reasons
            if logged and reasons != logged:
                next_log, pause = min(next_log, self._clock.monotonic() + _NEXT_LOG_SECONDS), _NEXT_LOG_SECONDS
            if self._clock.monotonic() >= next_log:
                log.info("not ready yet: %s", text)
                next_log, logged = self._clock.monotonic() + pause, reasons
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await self._clock.sleep(_READY_CHECK_SECONDS)
        log.info("ready after %.1f s", self._clock.monotonic() - started_at)
        try:
            self._announce()
        except OSError as cause:  # a full disk must not end the process
            log.warning("cannot print the line that begins with `ready`: %s", cause.strerror)
        for _ in range(_READY_ATTEMPTS):  # the manager waits for this one
            if self._manager.send(READY="1", STATUS="ready"):
                return
            await self._clock.sleep(_READY_CHECK_SECONDS)
