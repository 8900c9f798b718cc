"""A token of an OAuth 2.0 server for every request to a backend, by client credentials.

Source: RFC 6749 sections 2.3.1, 4.4 and 5; RFC 6750 section 2.1.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from headrace.config.backend import OAuth
from headrace.errors import DestinationUnavailable
from headrace.runtime import Clock
from headrace.sidecar.reactive.backend_connection import BackendResponse

_MARGIN_SECONDS: Final = 30.0
_UNSAID_SECONDS: Final = 300.0
_TOKEN: Final = re.compile(r"[!-~]+")
_ERROR: Final = re.compile(r"[a-z_]{1,40}")


class _Granted(msgspec.Struct):
    access_token: str = ""
    token_type: str = "Bearer"
    expires_in: float | None = None
    error: str = ""


_decode = msgspec.json.Decoder(_Granted, strict=False).decode


def token_headers(oauth: OAuth) -> dict[str, str]:
    """Return the headers of a request to the token server."""
    pair = f"{quote(oauth.client_id, safe='')}:{quote(oauth.client_secret.get_secret_value(), safe='')}"
    return {
        "Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}",
        "Content-Type": "application/x-www-form-urlencoded",
        "Accept": "application/json",
    }


class Token:
    """The current token: requested when needed, by one task at a time, and kept until shortly before it expires."""

    def __init__(
        self, oauth: OAuth, post: Callable[[bytes], Awaitable[BackendResponse]], close: Callable[[], None], clock: Clock
    ) -> None:
        """Prepare; `post` sends a form to the token server, `close` closes the connections to it."""
        self.close = close
        parameters = {"scope": oauth.scope, "audience": oauth.audience}
        self._form = urlencode({"grant_type": "client_credentials", **{k: v for k, v in parameters.items() if v}})
        self._url = oauth.token_url.partition("?")[0]
        """Without its query, which may hold secrets."""
        self._post = post
        self._clock = clock
        self._lock = asyncio.Lock()
        self._value = ""
        self._until = -1.0
        self._problem = ""
        self._failed_at = -1.0

    async def value(self) -> str:
        """Return a token that is valid for some time.

        Raises:
            DestinationUnavailable: The token server returned none.
        """
        since = self._clock.monotonic()
        if since < self._until:
            return self._value
        async with self._lock:
            if self._failed_at > since:  # tasks that waited meanwhile get the same error
                raise DestinationUnavailable(self._problem, url=self._url)
            if self._clock.monotonic() >= self._until:
                await self._fetch()
            return self._value

    def forget(self, token: str) -> None:
        """Do not use this token again: the backend refused it."""
        if token == self._value:
            self._until = -1.0

    async def _fetch(self) -> None:
        try:
            granted = self._read(await self._post(self._form.encode()))
        except DestinationUnavailable as cause:
            self._failed_at = self._clock.monotonic()
            self._problem = cause.description
            raise
        lasts = _UNSAID_SECONDS if granted.expires_in is None else granted.expires_in
        self._value = granted.access_token
        self._until = self._clock.monotonic() + lasts - min(_MARGIN_SECONDS, lasts / 10)

    def _read(self, response: BackendResponse) -> _Granted:
        try:
            granted = _decode(response.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            granted = _Granted()
        if response.status != 200:
            named = f" ({granted.error})" if _ERROR.fullmatch(granted.error) else ""
            check = ""
            if response.status in (400, 401):
                check = ": check oauth.client_id, oauth.client_secret and oauth.scope"
            why = f"it answered HTTP {response.status}{named}{check}"
        elif granted.token_type.lower() != "bearer" or not _TOKEN.fullmatch(granted.access_token):
            why = "its response has no bearer token: is oauth.token_url the token endpoint?"
        else:
            return granted
        raise DestinationUnavailable(f"waiting for the token server {self._url}: {why}", url=self._url)
