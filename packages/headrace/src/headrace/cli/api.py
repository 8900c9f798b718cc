"""How commands call a running Headrace: by the exchange of `headrace.client`, and without httpx, which starts slowly.

The URL is taken from an option, the environment (`HEADRACE_URL`) or the file; by default it is the default port of this
machine.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import ssl
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from headrace.cli.cluster_options import find_settings
from headrace.cli.global_options import uses
from headrace.cli.trust import certificates_of, trust, unreachable
from headrace.client.exchange import ClientRequest, HttpReply, accepted, error_of
from headrace.config.http import HttpConfig
from headrace.config.model import HeadraceConfig
from headrace.http.endpoint import Endpoint

_LIMIT_SECONDS = 60.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Api:
    """The HTTP API of one Headrace process, on one listener or two."""

    def __init__(
        self, url: str, limit_seconds: float = _LIMIT_SECONDS, management: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """Prepare without connecting; requests have the token in HEADRACE_TOKEN.

        Args:
            management: The URL of a management listener, if there is one.
            tls: Whose certificates are trusted; those of the system's authorities when None.

        Raises:
            click.UsageError: The URL is not valid.
        """
        try:
            named = urlsplit(url)
            known = named.scheme in ("http", "https") and named.hostname and named.port != 0
        except ValueError:
            known = False
        if not known:
            raise click.UsageError(f"{url!r} is not a valid URL: write it as http://127.0.0.1:8082")
        self.url = url.rstrip("/")
        self._management = management or self.url
        self.limit_seconds = limit_seconds
        token = os.environ.get("HEADRACE_TOKEN")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._opener = urllib.request.OpenerDirector()  # it follows no redirect: the token is for this server
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPHandler()]
        if named.hostname not in _LOOPBACK:
            handlers.append(urllib.request.ProxyHandler())
        if "https:" in (url[:6], management[:6]):
            handlers.append(urllib.request.HTTPSHandler(context=tls or trust(None)))
        for handler in handlers:
            self._opener.add_handler(handler)

    @property
    def has_token(self) -> bool:
        return bool(self._headers)

    def call(
        self, endpoint: Endpoint, body: Any = None, query: Mapping[str, Any] | None = None, /, **parameters: str
    ) -> dict[str, Any]:
        """Send a request to an endpoint and return the JSON of the response.

        Args:
            body: Sent as JSON; None for an empty object, or for nothing where the method has no body.
            query: Query parameters; those that are None are left out.

        Raises:
            EnvironmentProblem, HeadraceError: See `request`.
        """
        path, expected = endpoint.url(query, **parameters), tuple(endpoint.responses)
        return self.request(endpoint.method, path, body, expected, self._base(endpoint))

    def read(self, path: str) -> dict[str, Any]:
        """Send a GET to a path, the part `/adm` of the API to its own listener; see `request`."""
        base = self._management if path.startswith(("/adm/", "/cluster")) else self.url
        return self.request("GET", path, None, (503,) if path.startswith("/health/") else (), base)

    def request(
        self, method: str, path: str, body: Any = None, expected: Collection[int] = (), base: str = ""
    ) -> dict[str, Any]:
        """Send a request and return the JSON of the response, also of an error with an expected status.

        Raises:
            EnvironmentProblem: The server is unreachable.
            HeadraceError: The error of the server.
        """
        if body is None and method not in ("GET", "DELETE"):
            body = {}
        reply = self._send(base or self.url, ClientRequest(method, path, body), expected)
        try:
            found: dict[str, Any] = json.loads(reply.body) if reply.status != 204 else {}
        except (ValueError, RecursionError):
            raise error_of(reply) from None
        return found

    def fetch(self, endpoint: Endpoint, body: Any, media_type: str) -> bytes:
        """Send a request to an endpoint and return the body of the response, of this type; raises as `request`."""
        request = ClientRequest(endpoint.method, endpoint.url(), body, {"Accept": media_type})
        return self._send(self._base(endpoint), request).body

    def _base(self, endpoint: Endpoint) -> str:
        return self._management if endpoint.administers else self.url

    def _send(self, base: str, request: ClientRequest, expected: Collection[int] = ()) -> HttpReply:
        given, url = request.arguments, base + request.path
        headers = {**self._headers, **given["headers"]}
        sent = urllib.request.Request(url, given["content"], headers, method=request.method)
        try:
            with self._opener.open(sent, timeout=self.limit_seconds) as response:
                reply = HttpReply(response.status, response.read(), response.headers, url)
        except (OSError, http.client.HTTPException) as cause:
            raise unreachable(base, cause, self.limit_seconds) from cause
        return accepted(reply, expected)


def api_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Have a command use the options for the HTTP API; it gets `api` and `output`."""

    @uses("url", "ca", "config", "output")
    @functools.wraps(command)
    def run(output: str, url: str, ca: Path | None, config: Path | None, **others: Any) -> Any:
        return command(api=api_at(url, ca, config), output=output, **others)

    return run


def api_at(url: str | None, ca: Path | None, config: Path | None) -> Api:
    """Return the API that global options, the environment or the file name."""
    url = url or os.environ.get("HEADRACE_URL")
    settings = None if url else find_settings(config)
    management, tls = url or address_of(settings, management=True), trust(ca, certificates_of(settings))
    return Api(url or address_of(settings), management=management, tls=tls)


def address_of(settings: HeadraceConfig | None, *, management: bool = False) -> str:
    """Return the URL of a Headrace with these settings, None for the defaults; or that of its administration."""
    http = settings.http if settings else HttpConfig()
    listener = (management and http.management) or http
    host = f"[{listener.host}]" if ":" in listener.host else listener.host
    return f"{'https' if listener.tls.certificate else 'http'}://{host}:{listener.port}"
