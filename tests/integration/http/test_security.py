"""`headrace run` under signed tokens of an OAuth 2.0 server, as a client meets it."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from authlib.oauth2.rfc6749 import AuthorizationServer, ClientMixin, JsonRequest, OAuth2Request, grants
from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
from joserfc import jwt
from joserfc.jwk import ECKey

RECORD = {"records": [{"key": "k", "value": {"n": 1}}]}
CLIENTS = {"loader": "kafka:w", "reader": "kafka:r", "orders-only": "produce:orders.*"}


class Client(ClientMixin):
    """A client that may ask for its scope with its secret."""

    def __init__(self, name: str) -> None:
        self.client_id = name

    def get_allowed_scope(self, scope: str) -> str:
        return " ".join(part for part in (scope or "").split() if part in CLIENTS[self.client_id].split())

    def check_client_secret(self, secret: str) -> bool:
        return secret == f"{self.client_id}-secret"

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method == "client_secret_post"

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type == "client_credentials"


class Grant(grants.ClientCredentialsGrant):
    """Client credentials, sent in the body."""

    TOKEN_ENDPOINT_AUTH_METHODS: ClassVar[list[str]] = ["client_secret_post"]


class OAuth(AuthorizationServer):
    """Authlib's OAuth 2.0 server behind the standard library's HTTP server."""

    def __init__(self) -> None:
        super().__init__(scopes_supported=None)
        self.key = ECKey.generate_key("P-256", {"kid": "one"})
        self.url = ""
        self.register_grant(Grant)
        self.register_token_generator("default", self.token)

    def token(self, client: Client, grant_type: str, scope: str = "", seconds: int = 600, **_: Any) -> dict[str, Any]:
        claims = {"iss": self.url, "aud": "headrace", "exp": int(time.time()) + seconds, "client_id": client.client_id}
        signed = jwt.encode({"alg": "ES256", "kid": self.key.kid}, {**claims, "scope": scope}, self.key)
        return {"access_token": signed, "token_type": "Bearer", "expires_in": seconds}

    def query_client(self, client_id: str) -> Client | None:
        return Client(client_id) if client_id in CLIENTS else None

    def save_token(self, token: dict[str, Any], request: OAuth2Request) -> None:
        """Signed tokens need no memory."""

    def create_oauth2_request(self, request: OAuth2Request) -> OAuth2Request:
        return request

    def create_json_request(self, request: Any) -> JsonRequest:
        raise NotImplementedError

    def handle_response(self, status: int, body: Any, headers: Any) -> tuple[int, bytes]:
        return status, json.dumps(body).encode()

    def send_signal(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Nobody listens."""


@pytest.fixture
def oauth(monkeypatch: pytest.MonkeyPatch) -> Iterator[OAuth]:
    monkeypatch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
    server = OAuth()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, json.dumps({"keys": [server.key.as_dict(private=False)]}).encode())

        def do_POST(self) -> None:
            form = dict(urllib.parse.parse_qsl(self.rfile.read(int(self.headers["content-length"])).decode()))
            request = OAuth2Request("POST", server.url + self.path, headers=dict(self.headers))
            request.payload = BasicOAuth2Payload(form)
            request._body = form
            self._answer(*server.create_token_response(request))

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Be quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server.url = f"http://127.0.0.1:{listener.server_port}"
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield server
        listener.shutdown()


def bearer(oauth: OAuth, name: str) -> str:
    """Ask for a token, as a client does (client credentials)."""
    form = {"grant_type": "client_credentials", "client_id": name, "client_secret": f"{name}-secret"}
    data = urllib.parse.urlencode({**form, "scope": CLIENTS[name]}).encode()
    with urllib.request.urlopen(f"{oauth.url}/token", data, timeout=120) as response:
        return f"Bearer {json.load(response)['access_token']}"


def produce(url: str, authorization: str = "") -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", **({"Authorization": authorization} if authorization else {})}
    request = urllib.request.Request(url, json.dumps(RECORD).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_produce_with_tokens_of_an_oauth_server(site: Any, topic: Any, headrace: Any, oauth: OAuth) -> None:
    """Who has the scope writes; who has another or none does not."""
    name = topic()
    jwt_settings = {"issuer": oauth.url, "audience": "headrace", "jwks_url": f"{oauth.url}/jwks"}
    process = headrace({**site.config, "security": {"mode": "jwt", "jwt": jwt_settings}})
    url = f"{process.url}/producers/{name}"
    loader = bearer(oauth, "loader")
    status, response = produce(url, loader)
    assert (status, response["requestStatus"]) == (200, "OK")
    for authorization, status, code in (
        ("", 401, "ERR10002"),
        (loader[:-5], 401, "ERR10000"),
        (bearer(oauth, "reader"), 403, "ERR10005"),
        (bearer(oauth, "orders-only"), 403, "ERR10005"),
    ):
        found, response = produce(url, authorization)
        assert (found, response["code"]) == (status, code)
    assert response["metadata"]["scope"] == f"produce:{name}"
    assert site.ask(f"{process.url}/health/readiness").body == {"ready": True}
    assert site.ask(f"{process.url}/metrics").status == 401
    assert len(site.records(name)) == 1
    assert loader.split(".")[-1] not in process.output
