"""A token server: its keys, the tokens it signs, and what trusts it."""

from __future__ import annotations

import asyncio
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey

from headrace.config.http import JwtConfig
from headrace.http.auth.keys import Keys
from headrace.http.auth.principals import Principal
from headrace.http.auth.tokens import Tokens
from headrace_devkit.testing import ManualClock

NOW = 1_000_000.0


class TokenServer:
    """Signs tokens; its public keys stand in a file."""

    private = {
        "RS256": RSAKey.generate_key(2048, {"kid": "rsa"}),
        "ES256": ECKey.generate_key("P-256", {"kid": "ec"}),
        "EdDSA": OKPKey.generate_key("Ed25519", {"kid": "ed"}),
    }

    def __init__(self, folder: Path, now: float = NOW) -> None:
        self.now = now
        self.file = folder / "jwks.json"
        self.show(*self.private.values())
        self.clock = ManualClock(now)
        self.claims = {"iss": "issuer", "aud": "headrace", "exp": now + 600, "client_id": "loader", "scope": "kafka:w"}
        self.settings = JwtConfig(issuer="issuer", audience="headrace", jwks_file=self.file)
        self.keys = Keys(self.settings, self.clock)
        self.tokens = Tokens(self.settings, self.keys, self.clock)

    def show(self, *keys: Any) -> None:
        """Let the server have other keys."""
        self.file.write_text(json.dumps({"keys": [key.as_dict(private=False) for key in keys]}))

    def sign(self, payload: bytes | None = None, algorithm: str = "RS256", key: Any = None, **header: Any) -> str:
        """Return a token of the usual claims, or of a payload as it stands; header names with None are left out."""
        key = key or self.private[algorithm]
        full = {"alg": algorithm, "kid": key.kid, **header}
        registry = jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False)
        body = json.dumps(self.claims).encode() if payload is None else payload
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the name EdDSA
            return jws.serialize_compact({k: v for k, v in full.items() if v is not None}, body, key, registry=registry)

    def sign_claims(self, **changes: Any) -> str:
        """Return a token whose claims differ; those with None are left out."""
        claims = {name: value for name, value in {**self.claims, **changes}.items() if value is not None}
        return self.sign(json.dumps(claims).encode())

    def check(self, token: str) -> Principal:
        return asyncio.run(self.tokens.principal_of(token))


@pytest.fixture
def server(tmp_path: Path) -> TokenServer:
    return TokenServer(tmp_path)
