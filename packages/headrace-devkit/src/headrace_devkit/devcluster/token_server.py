"""The token server of a secured dev cluster, and a way to its schema registry with TLS and a login.

It gives tokens for the client credentials of the cluster's users (RFC 6749, section 4.4). Paths below `/apis/` are
passed on to the registry, for users that log in with HTTP basic authentication.

usage: python -m headrace_devkit.devcluster.token_server FOLDER PORT REGISTRY_PORT TOKEN_SECONDS
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hmac
import http.client
import json
import ssl
import sys
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from headrace_devkit.devcluster.certificates import SERVER_NAME
from headrace_devkit.devcluster.group import ServerGroup
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.security import AUDIENCE, ISSUER, ClusterSecurity
from headrace_jvm import Progress

_LIMIT_SECONDS = 30.0


class TokenServer(ServerGroup):
    """The token server of a cluster, as a process."""

    title = "the token server"
    state_name = "tokens.json"
    port_option = "--token-port"
    ports_per_server = 1

    def __init__(
        self,
        directory: Path,
        security: ClusterSecurity,
        *,
        registry_port: int = 0,
        token_seconds: int = 300,
        detached: bool = False,
    ) -> None:
        """Describe it.

        Args:
            directory: Folder for its log.
            security: The secrets of the cluster.
            registry_port: Port of the registry that it protects; 0 for none.
            token_seconds: How long a token is valid.
            detached: Whether it outlives this process.
        """
        super().__init__(directory, detached=detached)
        self._arguments = security.folder, registry_port, token_seconds
        self.server = self._add(1, Server("The token server", self._directory / "tokens.log"))

    @property
    def token_url(self) -> str:
        """Where clients get tokens."""
        return f"https://{SERVER_NAME}:{self.ports[0]}/token"

    @property
    def registry_url(self) -> str:
        """Base URL of the registry behind TLS and a login; the path of its API follows."""
        return f"https://{SERVER_NAME}:{self.ports[0]}"

    def install(self, progress: Progress | None = None) -> None:
        """Do nothing: it is part of Headrace."""

    def _command(self, n: int) -> list[str]:
        folder, registry_port, seconds = self._arguments
        numbers = map(str, (self.ports[0], registry_port, seconds))
        return [sys.executable, "-m", "headrace_devkit.devcluster.token_server", str(folder), *numbers]

    def _wait_ready(self, limit_seconds: float) -> None:
        self.server.wait_until(lambda: _answers(self.ports[0]), limit_seconds)


def _answers(port: int) -> bool:
    context = ssl._create_unverified_context()
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)) as connection:
        connection.request("GET", "/jwks")
        return connection.getresponse().status == 200


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, security: ClusterSecurity, registry_port: int, token_seconds: int, *connection: object) -> None:
        self._security, self._registry_port, self._token_seconds = security, registry_port, token_seconds
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path == "/jwks":
            self._answer(200, self._security.jwks.read_bytes())
        else:
            self._pass_on()

    def do_POST(self) -> None:
        if self.path == "/token":
            self._give_token()
        else:
            self._pass_on()

    do_PUT = do_DELETE = do_GET  # noqa: N815

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _user(self) -> str:
        """Return the user whose password is in the request; empty if it is wrong."""
        kind, _, text = (self.headers.get("authorization") or "").partition(" ")
        try:
            user, _, password = base64.b64decode(text).decode().partition(":")
        except ValueError:
            return ""
        user, password = urllib.parse.unquote(user), urllib.parse.unquote(password)
        known = self._security.client_secrets(user) if kind == "Basic" else []
        return user if any(hmac.compare_digest(password.encode(), secret.encode()) for secret in known) else ""

    def _give_token(self) -> None:
        form = dict(urllib.parse.parse_qsl(self._body().decode()))
        if not (user := self._user()):
            self._answer(401, b'{"error":"invalid_client"}')
        elif form.get("grant_type") != "client_credentials":
            self._answer(400, b'{"error":"unsupported_grant_type"}')
        else:
            from joserfc import jwt  # as in security.py
            from joserfc.jwk import RSAKey

            key = RSAKey.import_key(json.loads((self._security.folder / "token.key").read_text()))
            now = int(time.time())
            claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": user, "iat": now, "exp": now + self._token_seconds}
            claims |= {"scope": form["scope"]} if "scope" in form else {}
            token = jwt.encode({"alg": "RS256", "kid": "dev"}, claims, key)
            response = {"access_token": token, "token_type": "Bearer", "expires_in": self._token_seconds}
            self._answer(200, json.dumps(response).encode())
            sys.stdout.write(f"gave a token to {user}\n")
            sys.stdout.flush()

    def _pass_on(self) -> None:
        body = self._body()
        if not self._user():
            self._answer(401, b'{"error_code":40101,"message":"Unauthorized"}', {"WWW-Authenticate": "Basic"})
        elif not self._registry_port or not self.path.startswith("/apis/"):
            self._answer(404, b'{"error_code":404,"message":"not found"}')
        else:
            registry = http.client.HTTPConnection("127.0.0.1", self._registry_port, timeout=_LIMIT_SECONDS)
            kept = {name: value for name in ("content-type", "accept") if (value := self.headers.get(name))}
            registry.request(self.command, self.path, body or None, kept)
            response = registry.getresponse()
            self._answer(response.status, response.read(), {"Content-Type": response.headers["content-type"] or ""})
            registry.close()

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        """Log nothing: requests hold secrets."""


def main(folder: str, port: str, registry_port: str, token_seconds: str) -> None:
    """Serve until the process is ended."""
    security = ClusterSecurity(Path(folder))
    handler = functools.partial(_Handler, security, int(registry_port), int(token_seconds))
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(security.server_store)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
