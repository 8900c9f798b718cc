"""The client that commands use for the HTTP API of a running Headrace.

The URL is taken from an option, the environment (`HEADRACE_URL`) or the file; by default it is the default port of this
machine.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from headrace.cli.cluster_options import find_settings, with_environment
from headrace.cli.global_options import uses
from headrace.cli.trust import certificates_of, trust, unreachable
from headrace.config.http import HttpConfig
from headrace.config.model import HeadraceConfig
from headrace.config.whole_file import WholeFile
from headrace.errors import HeadraceError
from headrace.http.endpoint import Endpoint

_LIMIT_SECONDS = 60.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Api:
    """The HTTP API of one Headrace process."""

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
        self.settings: HeadraceConfig | None = None
        """Of the file and the environment, if no URL was given."""
        token = os.environ.get("HEADRACE_TOKEN")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        here = urlsplit(url).hostname in _LOOPBACK
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})] if here else []
        if "https:" in (url[:6], management[:6]):
            handlers.append(urllib.request.HTTPSHandler(context=tls or trust(None)))
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def has_token(self) -> bool:
        """Whether requests have a token."""
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
            HeadraceError: The error of the server; code and status are in its parameters.
        """
        if body is None and method not in ("GET", "DELETE"):
            body = {}
        content = None if body is None else json.dumps(body).encode()
        return self._response(*self._send(method, base or self.url, path, content), expected)

    def fetch(self, endpoint: Endpoint, body: Any, media_type: str) -> bytes:
        """Send a request to an endpoint and return the body of the response, of this type; raises as `request`."""
        status, content = self._send(
            endpoint.method, self._base(endpoint), endpoint.url(), json.dumps(body).encode(), media_type
        )
        if status >= 400:
            self._response(status, content, ())
        return content

    def _response(self, status: int, text: bytes, expected: Collection[int]) -> dict[str, Any]:
        """Return the JSON of a response.

        Raises:
            HeadraceError: It is an error whose status is not expected.
        """
        try:
            found: dict[str, Any] = json.loads(text) if text else {}
            if status < 400 or status in expected:
                return found
            description, code = str(found["description"]), str(found["code"])
        except (ValueError, LookupError, TypeError):
            raise HeadraceError(
                f"{self.url} answers {status} without an error of Headrace: it is another server, or a proxy in front "
                "of Headrace",
                status=status,
                code="",
            ) from None
        raise HeadraceError(description, status=status, code=code)

    def _base(self, endpoint: Endpoint) -> str:
        return self._management if endpoint.administers else self.url

    def _send(self, method: str, base: str, path: str, data: bytes | None, accept: str = "") -> tuple[int, bytes]:
        headers = {**self._headers, **({"Content-Type": "application/json"} if data is not None else {})}
        if accept:
            headers["Accept"] = accept
        request = urllib.request.Request(base + path, data, headers, method=method)
        try:
            try:
                with self._opener.open(request, timeout=self.limit_seconds) as response:
                    return response.status, response.read()
            except urllib.error.HTTPError as refused:
                return refused.code, refused.read()
        except (OSError, http.client.HTTPException) as cause:
            raise unreachable(base, cause, self.limit_seconds) from cause


def api_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Have a command use the options for the HTTP API; it gets `api` and `output`."""

    @uses("url", "ca", "config", "output")
    @functools.wraps(command)
    def run(output: str, url: str, ca: Path | None, config: Path | None, **others: Any) -> Any:
        return command(api=api_at(url, ca, config), output=output, **others)

    return run


def api_at(url: str | None, ca: Path | None, config: Path | None, limit_seconds: float = _LIMIT_SECONDS) -> Api:
    """Return the API that global options, the environment or the file name."""
    url = url or os.environ.get("HEADRACE_URL")
    settings = None if url else find_settings(config)
    management, tls = url or address_of(settings, management=True), trust(ca, certificates_of(settings))
    api = Api(url or address_of(settings), limit_seconds, management, tls)
    api.settings = None if url else settings or with_environment(WholeFile())
    return api


def address_of(settings: HeadraceConfig | None, *, management: bool = False) -> str:
    """Return the URL of a Headrace with these settings, None for the defaults; or that of its administration."""
    http = settings.http if settings else HttpConfig()
    listener = (management and http.management) or http
    host = f"[{listener.host}]" if ":" in listener.host else listener.host
    return f"{'https' if listener.tls.certificate else 'http'}://{host}:{listener.port}"
