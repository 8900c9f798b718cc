"""Pushes all metrics to a server, at an interval. A server that is down costs a line in the log, and nothing else."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from headrace.runtime.clock import Clock, Deadline
from headrace.runtime.service import Service
from headrace.runtime.telemetry.metrics import Metrics, Snapshot
from headrace.runtime.threads import run_blocking

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

_LAST_PUSH_SECONDS: Final = 2.0
_MAX_RESPONSE_BYTES: Final = 65_536
_SHOWN_CHARACTERS: Final = 200


class PushTarget:
    """A server, and the format that it takes."""

    def __init__(
        self, name: str, url: str, headers: Mapping[str, str], *, interval_seconds: float, timeout_seconds: float
    ) -> None:
        self.name = name
        """Label `target` of the failures."""
        self.url = url
        self.headers = dict(headers)
        self.interval_seconds = interval_seconds
        self.timeout_seconds = timeout_seconds
        """Longest wait for one response."""
        self.tls: ssl.SSLContext | bool = True
        """Authorities to trust; True for those of the system."""

    def take(self) -> None:
        """Prepare the numbers that only this target has; on the loop."""

    def encode(self, snapshot: Snapshot) -> list[bytes]:
        """Return the bodies of the requests; on another thread."""
        raise NotImplementedError

    def problem_in(self, response: bytes) -> str:
        """Return what the body of a successful response says was not taken; empty if nothing."""
        return ""

    def accepted(self, body: int) -> None:
        """Take notice that a body, by its index in what `encode` returned, was accepted."""


class _PushFailed(Exception):
    """The server did not take a body, with the reason."""


class MetricsPush(Service):
    """Pushes to one server. What fails is not repeated: counters only grow, so the next push has it."""

    def __init__(self, target: PushTarget, metrics: Metrics, clock: Clock) -> None:
        """Prepare; the server may be down."""
        super().__init__(f"metrics to {target.name}")
        parts = urlsplit(target.url)
        user, _, address = parts.netloc.rpartition("@")
        self._shown = f"{parts.scheme}://{address}{parts.path}"  # a query may hold a secret
        # A server may respond with what it got, and the client's errors name the whole URL.
        given = [value for name, value in target.headers.items() if not name.lower().startswith("content-")]
        self._secrets = [secret for secret in (*given, user, parts.query) if secret]
        self._target = target
        self._metrics = metrics
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._failures = 0
        self._down_since: float | None = None

    async def start(self) -> None:
        self.publish("headrace_metrics_push_failures_total", lambda: self._failures, target=self._target.name)
        await super().start()

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._target.interval_seconds)
            await self.push()

    async def drain(self, deadline: Deadline) -> None:
        """Push once more, so that the numbers of the last interval are not lost."""
        await self.cancel_tasks()
        if self._down_since is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.push(), min(_LAST_PUSH_SECONDS, deadline.remaining_seconds))

    async def stop(self) -> None:
        await super().stop()
        if self._session:
            await self._session.close()

    async def push(self) -> None:
        """Push the present numbers; a failure is counted, and logged when an outage begins."""
        self._target.take()
        bodies = await run_blocking(self._target.encode, self._metrics.snapshot())
        try:
            for number, body in enumerate(bodies):
                await self._send(body)
                self._target.accepted(number)
        except _PushFailed as why:
            self._failures += 1
            if self._down_since is None:
                self._down_since = self._clock.monotonic()
                text = self._masked(str(why))[:_SHOWN_CHARACTERS]
                log.warning("metrics are not taken by %s: %s; pushes continue without more lines", self._shown, text)
        else:
            if self._down_since is not None:
                seconds = self._clock.monotonic() - self._down_since
                log.warning("metrics are taken by %s again after %.0f s", self._shown, seconds)
            self._down_since = None

    async def _send(self, body: bytes) -> None:
        import aiohttp  # here, because most processes push to no server

        target = self._target
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=target.tls)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        limit = aiohttp.ClientTimeout(target.timeout_seconds)
        sent: dict[str, Any] = {"data": body, "headers": target.headers, "allow_redirects": False}
        try:
            async with self._session.post(target.url, timeout=limit, **sent) as response:
                status, found = response.status, await response.content.read(_MAX_RESPONSE_BYTES)
        except TimeoutError:
            raise _PushFailed(f"no response within {target.timeout_seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as cause:
            raise _PushFailed(f"no connection ({cause})") from cause
        if not 200 <= status < 300:
            raise _PushFailed(f"it responds with HTTP {status} {found.decode(errors='replace')}")
        if why := target.problem_in(found):
            raise _PushFailed(why)

    def _masked(self, text: str) -> str:
        """Return a text on one line, without what the requests carry."""
        for secret in self._secrets:
            text = text.replace(secret, "*****")
        return " ".join(text.split())
