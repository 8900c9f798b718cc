"""The health check of a backend, `health.downstream_url`."""

from urllib.parse import urlsplit

import aiohttp

from headrace.config.administration import HealthConfig
from headrace.errors import DestinationUnavailable
from headrace.runtime.tls import WatchedFiles


class BackendCheck:
    """Asks the backend whether it works; for use on one loop."""

    def __init__(self, settings: HealthConfig, url: str, tls: WatchedFiles | None = None) -> None:
        """Prepare; the backend may be down. Without `tls`, the system's authorities are trusted."""
        parts = urlsplit(url)
        self._url = url
        self._shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold a secret
        self._seconds = settings.timeout_seconds
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def check(self) -> None:
        """Send the request; DestinationUnavailable unless the response is 2xx and in time."""
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        if self._tls:
            self._tls.look()
        trust = self._tls.context if self._tls else True
        try:
            limit = aiohttp.ClientTimeout(self._seconds)
            async with self._session.get(self._url, allow_redirects=False, timeout=limit, ssl=trust) as response:
                status = response.status
        except TimeoutError as cause:
            raise self._unavailable(f"no response within {self._seconds:g} s (health.timeout_seconds)") from cause
        except aiohttp.ClientConnectorCertificateError as cause:
            why = f"its certificate is not trusted ({cause.certificate_error}): name its authority in backend.tls.ca"
            raise self._unavailable(f"{why} of the consumer with this backend") from cause
        except (aiohttp.ClientError, OSError, ValueError) as cause:
            raise self._unavailable("no connection: start it, or correct health.downstream_url") from cause
        if not 200 <= status < 300:
            raise self._unavailable(f"it responds with HTTP {status}")

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    def _unavailable(self, why: str) -> DestinationUnavailable:
        return DestinationUnavailable(f"the backend at {self._shown} is not healthy: {why}")
