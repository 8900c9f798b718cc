"""Pushes metrics to an InfluxDB by line protocol."""

import base64
import logging
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from headrace.runtime import Clock, run_blocking
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.telemetry.periodic_push import PeriodicPush, PushFailed
from headrace_dialects.light4j.influx_sections import InfluxDbConfig
from headrace_dialects.light4j.influxdb import InfluxLines

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 10.0
_MAX_RESPONSE_BYTES: Final = 65_536
_SHOWN_CHARACTERS: Final = 200


class InfluxPush(PeriodicPush):
    """Pushes to an InfluxDB of version 1 or 2."""

    def __init__(self, settings: InfluxDbConfig, metrics: Metrics, lines: InfluxLines, clock: Clock) -> None:
        """Prepare; the server may be down."""
        parts = urlsplit(settings.url)
        shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold a secret
        super().__init__("influxdb", shown, settings.interval_seconds, clock)
        token = settings.token.get_secret_value()
        # Not every version 1 knows the scheme Token, and each knows Basic.
        login = f"Basic {base64.b64encode(token.encode()).decode()}" if ":" in token else f"Token {token}"
        self._headers = {"Content-Type": "text/plain; charset=utf-8"} | ({"Authorization": login} if token else {})
        # A server may respond with what it got, and the client's errors name the whole URL.
        self._secrets = [secret for secret in (login if token else "", parts.query) if secret]
        self._url = settings.url
        self._timeout_seconds = min(_TIMEOUT_SECONDS, settings.interval_seconds)
        self._metrics = metrics
        self._lines = lines
        self._session: aiohttp.ClientSession | None = None
        for warning in settings.warnings:
            log.warning("%s", warning)

    async def send(self) -> None:
        self._lines.take()
        bodies = await run_blocking(self._lines.encode, self._metrics.snapshot())
        for number, body in enumerate(bodies):
            await self._send(body)
            self._lines.accepted(number)

    async def stop(self) -> None:
        await super().stop()
        if self._session:
            await self._session.close()

    async def _send(self, body: bytes) -> None:
        import aiohttp  # here, because most processes push to no server

        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        limit = aiohttp.ClientTimeout(self._timeout_seconds)
        sent: dict[str, Any] = {"data": body, "headers": self._headers, "allow_redirects": False}
        try:
            async with self._session.post(self._url, timeout=limit, **sent) as response:
                status, found = response.status, await response.content.read(_MAX_RESPONSE_BYTES)
        except TimeoutError:
            raise PushFailed(f"no response within {self._timeout_seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as cause:
            raise PushFailed(self._masked(f"no connection ({cause})")) from cause
        if not 200 <= status < 300:
            raise PushFailed(self._masked(f"it responds with HTTP {status} {found.decode(errors='replace')}"))

    def _masked(self, text: str) -> str:
        """Return the beginning of a text on one line, without what the requests carry."""
        for secret in self._secrets:
            text = text.replace(secret, "*****")
        return " ".join(text.split())[:_SHOWN_CHARACTERS]
