"""`headrace run` with signed tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey

from tests.active_client import send

RECORD = {"records": [{"key": "k", "value": {"n": 1}}]}
KEY = ECKey.generate_key("P-256", {"kid": "one"})


def bearer(scope: str) -> str:
    claims = {"iss": "issuer", "aud": "headrace", "exp": int(time.time()) + 600, "client_id": "loader", "scope": scope}
    return f"Bearer {jwt.encode({'alg': 'ES256', 'kid': 'one'}, claims, KEY)}"


def test_produce_with_signed_tokens(site: Any, topic: Any, headrace: Any, tmp_path: Path) -> None:
    """A caller with the scope writes; a caller with another or none does not."""
    name = topic()
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [KEY.as_dict(private=False)]}))
    settings = {"issuer": "issuer", "audience": "headrace", "jwks_file": str(tmp_path / "jwks.json")}
    process = headrace({**site.config, "security": {"mode": "jwt", "jwt": settings}})
    url = f"{process.url}/producers/{name}"
    loader = bearer("kafka:w")
    response = send("POST", url, RECORD, {"Authorization": loader})
    assert (response.status, response.body["requestStatus"]) == (200, "OK")
    for headers, status, code in (
        ({}, 401, "ERR10002"),
        ({"Authorization": loader[:-5]}, 401, "ERR10000"),
        ({"Authorization": bearer("kafka:r")}, 403, "ERR10005"),
        ({"Authorization": bearer("produce:orders.*")}, 403, "ERR10005"),
    ):
        response = send("POST", url, RECORD, headers)
        assert (response.status, response.body["code"]) == (status, code)
    assert response.body["metadata"]["scope"] == f"produce:{name}"
    assert site.ask(f"{process.url}/health/readiness").body == {"ready": True}
    assert site.ask(f"{process.url}/metrics").status == 401
    assert len(site.records(name)) == 1
    assert loader.split(".")[-1] not in process.output
