"""`headrace run` with signed tokens, whose keys are read from the URL of a token server."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from tests.active_client import send

RECORD = {"records": [{"key": "k", "value": {"n": 1}}]}
KEY = ECKey.generate_key("P-256", {"kid": "one"})


class KeySet(http.server.BaseHTTPRequestHandler):
    """Serves the public key."""

    def do_GET(self) -> None:
        body = json.dumps({"keys": [KEY.as_dict(private=False)]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def issuer() -> Iterator[str]:
    """URL of a token server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), KeySet) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


def bearer(issuer: str, scope: str) -> str:
    claims = {"iss": issuer, "aud": "headrace", "exp": int(time.time()) + 600, "client_id": "loader", "scope": scope}
    return f"Bearer {jwt.encode({'alg': 'ES256', 'kid': 'one'}, claims, KEY)}"


def test_produce_with_signed_tokens(site: Any, topic: Any, headrace: Any, issuer: str) -> None:
    """A caller with the scope writes; a caller with another or none does not."""
    name = topic()
    settings = {"issuer": issuer, "audience": "headrace", "jwks_url": f"{issuer}/jwks"}
    process = headrace({**site.config, "security": {"mode": "jwt", "jwt": settings}})
    url = f"{process.url}/producers/{name}"
    loader = bearer(issuer, "kafka:w")
    response = send("POST", url, RECORD, {"Authorization": loader})
    assert (response.status, response.body["requestStatus"]) == (200, "OK")
    for headers, status, code in (
        ({}, 401, "ERR10002"),
        ({"Authorization": loader[:-5]}, 401, "ERR10000"),
        ({"Authorization": bearer(issuer, "kafka:r")}, 403, "ERR10005"),
        ({"Authorization": bearer(issuer, "produce:orders.*")}, 403, "ERR10005"),
    ):
        response = send("POST", url, RECORD, headers)
        assert (response.status, response.body["code"]) == (status, code)
    assert response.body["metadata"]["scope"] == f"produce:{name}"
    assert site.ask(f"{process.url}/health/readiness").body == {"ready": True}
    assert site.ask(f"{process.url}/metrics").status == 401
    assert len(site.records(name)) == 1
    assert loader.split(".")[-1] not in process.output
