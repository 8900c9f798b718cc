"""Which signed tokens are taken, and which are not."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from joserfc.jwk import RSAKey

from headrace.http.auth.principals import TokenExpired, TokenRefused
from headrace.http.auth.tokens import Tokens
from tests.running_server import OpenServer
from tests.unit.http.auth.conftest import TokenServer

STRANGER = RSAKey.generate_key(2048, {"kid": "rsa"})


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def unsigned(server: Any, algorithm: str) -> str:
    return f"{part({'alg': algorithm, 'kid': 'rsa'})}.{part(server.claims)}."


def with_public_key_as_secret(server: Any) -> str:
    head, body = part({"alg": "HS256", "kid": "rsa"}), part(server.claims)
    secret = server.private["RS256"].as_pem(private=False)
    signature = hmac.new(secret, f"{head}.{body}".encode(), "sha256").digest()
    return f"{head}.{body}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def changed_payload(server: Any) -> str:
    head, _, signature = server.sign().split(".")
    return f"{head}.{part({**server.claims, 'scope': 'admin'})}.{signature}"


def twice(server: Any) -> str:
    text = json.dumps(server.claims)
    return server.sign(text[:-1].encode() + b', "scope": "admin"}')


WRONG: dict[str, list[Any]] = {
    "iss": ["other", None],
    "aud": ["other", None, ["other", "headrace2"]],
    "exp": [None, "9999999999", True, float("inf"), float("nan"), 10**400],
    "client_id": [None, "a\nb"],
    "scope": [1, [1]],
}
BAD: dict[str, Callable[[Any], str]] = {
    "empty": lambda s: "",
    "one word": lambda s: "abc",
    "two parts": lambda s: s.sign().rpartition(".")[0],
    "five parts": lambda s: "a.b.c.d.e",
    "truncated": lambda s: s.sign()[:-7],
    "no signature": lambda s: s.sign().rpartition(".")[0] + ".",
    "100 KB": lambda s: s.sign_claims(filling="x" * 100_000),
    "20 KB": lambda s: s.sign_claims(filling="x" * 15_000),
    "not base64": lambda s: "!!!." + s.sign().partition(".")[2],
    "other alphabet": lambda s: s.sign().replace(".", ".\u00e9", 1),
    "header no object": lambda s: f"{part([1])}.{part(s.claims)}.AA",
    "header deep": lambda s: f"{base64.urlsafe_b64encode(b'[' * 5000).decode()}.{part(s.claims)}.AA",
    **{f"alg {name}": lambda s, name=name: unsigned(s, name) for name in ("none", "None", "NONE", "nOnE")},
    "alg missing": lambda s: f"{part({'kid': 'rsa'})}.{part(s.claims)}.AA",
    "alg a list": lambda s: f"{part({'alg': ['RS256'], 'kid': 'rsa'})}.{part(s.claims)}.AA",
    "alg HS256 with the public key": with_public_key_as_secret,
    "alg RS512": lambda s: s.sign(algorithm="RS512", key=s.private["RS256"]),
    "alg PS256": lambda s: s.sign(algorithm="PS256", key=s.private["RS256"]),
    "key of another algorithm": lambda s: s.sign(algorithm="ES256", kid="rsa"),
    "wrong key": lambda s: s.sign(key=STRANGER),
    "unknown kid": lambda s: s.sign(kid="unknown"),
    "kid a path": lambda s: s.sign(kid="../../../dev/null"),
    "kid SQL": lambda s: s.sign(kid="' OR 1=1 --"),
    "kid a number": lambda s: f"{part({'alg': 'RS256', 'kid': 7})}.{part(s.claims)}.AA",
    "jku of ours": lambda s: s.sign(key=STRANGER, jku="http://localhost/jwks.json"),
    "x5u of ours": lambda s: s.sign(key=STRANGER, x5u="http://localhost/x.pem"),
    "key in the token": lambda s: s.sign(key=STRANGER, jwk=STRANGER.as_dict(private=False)),
    "crit": lambda s: f"{part({'alg': 'RS256', 'kid': 'rsa', 'crit': ['exp']})}.{part(s.claims)}.AA",
    "wrong type": lambda s: s.sign(typ="logout+jwt"),
    "changed payload": changed_payload,
    "nested": lambda s: s.sign(s.sign().encode(), cty="JWT"),
    "payload no object": lambda s: s.sign(b"[1]"),
    "payload no JSON": lambda s: s.sign(b"{"),
    "claim twice": twice,
    **{
        f"{name} {value!r:.9}": lambda s, name=name, value=value: s.sign_claims(**{name: value})
        for name, values in WRONG.items()
        for value in values
    },
    "expired 61 s": lambda s: s.sign_claims(exp=s.now - 61),
    "for too long": lambda s: s.sign_claims(exp=s.now + 86_401),
    "nbf in the future": lambda s: s.sign_claims(nbf=s.now + 600),
    "iat in the future": lambda s: s.sign_claims(iat=s.now + 600),
}


async def test_bad_tokens_are_refused(opened: OpenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row J1: each is 401 with one body, which only for an expired one is another; nothing reaches Kafka."""
    monkeypatch.setattr("headrace.http.auth.rate_limit._FREE_FAILURES", len(BAD) + 1)
    tokens = TokenServer(tmp_path, time.time())
    usual = "X-Correlation-Id: c\r\nContent-Type: application/json\r\nContent-Length: 25\r\n"
    jwt = {"issuer": "issuer", "audience": "headrace", "jwks_file": str(tokens.file)}
    async with opened(security={"mode": "jwt", "jwt": jwt}) as running:

        async def ask(token: str) -> tuple[int, bytes]:
            head = f"POST /producers/t HTTP/1.1\r\nHost: h\r\n{usual}Authorization: Bearer {token}\r\n\r\n"
            response = await running.ask(head.encode("latin-1") + b'{"records":[{"value":1}]}')
            return response.status, response.body

        assert (await ask(tokens.sign()))[0] == 200
        assert len(BAD) >= 50
        found = {case: await ask(token(tokens)) for case, token in BAD.items()}
        assert (found.pop("100 KB")[0], found.pop("expired 61 s")[0]) == (431, 401)
        assert {status for status, _ in found.values()} == {401}, found
        assert len({body for _, body in found.values()}) == 1, found
        assert len(running.kafka.producer.records) == 1


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_good_token_says_who_and_what(server: TokenServer, algorithm: str) -> None:
    """Under every algorithm, with and without a type."""
    for kind in (None, "JWT", "at+jwt"):
        principal = server.check(server.sign(algorithm=algorithm, typ=kind))
        assert (principal.name, principal.scopes) == ("loader", {"kafka:w"})
        assert principal.expires_at == server.claims["exp"] + 60


@pytest.mark.parametrize(("claims", "scopes"), yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text()))
def test_claims_are_read_in_their_usual_spellings(
    server: TokenServer, claims: dict[str, Any], scopes: list[str]
) -> None:
    """`scope` or `scp`, text or list; audience in a list; a minute of leeway at both ends."""
    assert server.check(server.sign_claims(**claims)).scopes == {*scopes}


def test_a_token_without_kid_is_checked_with_the_only_key(server: TokenServer) -> None:
    """With two keys of one algorithm it would be a guess."""
    token = server.sign(kid=None)
    assert server.check(token).name == "loader"
    server.show(*server.private.values(), RSAKey.generate_key(2048, {"kid": "second"}))
    server.tokens._known.clear()
    server.keys._tried_at = float("-inf")
    with pytest.raises(TokenRefused):
        server.check(server.sign(kid="unknown"))
    with pytest.raises(TokenRefused):
        server.check(token)


def test_a_known_token_is_not_checked_again_and_still_ends(server: TokenServer) -> None:
    """The second look costs no signature; the end comes with the leeway, row J2."""
    token = server.sign()
    server.check(token)
    first = server.check(token)  # the keys, read for the first look, count as changed
    server.tokens._claims = None  # a signature would be checked with this
    assert server.check(token) is first
    asyncio.run(server.clock.advance(659))
    assert server.check(token) is first
    asyncio.run(server.clock.advance(2))
    with pytest.raises(TokenExpired):
        server.check(token)
    assert not server.tokens._known


def test_known_tokens_are_bounded(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row I6: what callers send does not grow the process."""
    monkeypatch.setattr("headrace.http.auth.tokens._MAX_CACHED", 3)
    server.tokens = Tokens(server.settings, server.keys, server.clock)
    for number in range(10):
        server.check(server.sign_claims(jti=str(number)))
    assert len(server.tokens._known) == 3


def test_a_key_that_is_gone_ends_what_it_signed(server: TokenServer) -> None:
    """A token that was good is checked again when the keys have changed."""
    token = server.sign()
    server.check(token)
    server.show(server.private["ES256"])
    server.keys._tried_at = float("-inf")
    server.check(server.sign(algorithm="ES256"))
    with pytest.raises(TokenRefused):
        server.check(server.sign(kid="new"))
    with pytest.raises(TokenRefused):
        server.check(token)
