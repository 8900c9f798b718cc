"""What a signed token must be to be taken. Source: RFC 7519; RFC 8725 (fixed algorithms, key bound to algorithm)."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from typing import Any, Final

from joserfc import jws
from joserfc.errors import JoseError, UnsupportedAlgorithmError

from headrace.config.http import JwtConfig
from headrace.lifecycle import Clock
from headrace.security.keys import ALGORITHMS, Keys
from headrace.security.principals import Principal, TokenExpired, TokenRefused

_MAX_CHARACTERS: Final = 8192
_MAX_CACHED: Final = 10_000
_LAST_MOMENT: Final = 1e12
_TYPES: Final = (None, "JWT", "jwt", "at+jwt", "application/at+jwt")
_NAMES: Final = ("client_id", "cid", "azp", "user_id", "uid", "sub")


class _Registry(jws.JWSRegistry):
    max_header_length = 2048

    def get_alg(self, name: str) -> Any:
        # The library warns of EdDSA, because RFC 9864 names the curve; here the key decides the curve.
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(name)
        return self.algorithms[name]


_REGISTRY: Final = _Registry(strict_check_header=False)


class Tokens:
    """Checks tokens; one that was good is not checked again until it ends."""

    def __init__(self, settings: JwtConfig, keys: Keys, clock: Clock) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock
        self._known: OrderedDict[str, Principal] = OrderedDict()
        self._generation = keys.generation

    async def principal_of(self, token: str) -> Principal:
        """Return whom a token speaks for.

        Raises:
            TokenRefused: It is not taken; `TokenExpired` if only its time is over.
            KeysUnavailable: No keys are there to check it with.
        """
        if known := self.known(token):
            return known
        if self._known.pop(token, None):
            raise TokenExpired("expired")
        claims = await self._claims(token)
        ends_at = self._check(claims)
        principal = self._known[token] = Principal(_name(claims), _scopes(claims), expires_at=ends_at)
        if len(self._known) > _MAX_CACHED:
            self._known.popitem(last=False)
        return principal

    def known(self, token: str) -> Principal | None:
        """Return whom a token speaks for that was good before and has not ended."""
        if self._keys.generation != self._generation:
            self._known.clear()
            self._generation = self._keys.generation
        known = self._known.get(token)
        return known if known and self._clock.time() <= known.expires_at else None

    async def _claims(self, token: str) -> dict[str, Any]:
        if len(token) > _MAX_CHARACTERS or token.count(".") != 2:
            raise TokenRefused("no token")
        try:
            header = _object(_decoded(token.partition(".")[0]))
            algorithm, kid = header.get("alg"), header.get("kid")
            if not isinstance(algorithm, str) or algorithm not in ALGORITHMS or header.get("typ") not in _TYPES:
                raise TokenRefused("algorithm or type")
            if "crit" in header or "b64" in header or not isinstance(kid, str | None):
                raise TokenRefused("header")
            key = await self._keys.find(kid, ALGORITHMS[algorithm])
            if key is None:
                raise TokenRefused("unknown key")
            signed = jws.deserialize_compact(token, key, registry=_REGISTRY)
            return _object(signed.payload or b"")
        except (JoseError, ValueError, TypeError, RecursionError) as cause:
            raise TokenRefused("not well formed or not signed by the server") from cause

    def _check(self, claims: dict[str, Any]) -> float:
        """Return until when the token is taken, leeway included."""
        settings, now = self._settings, self._clock.time()
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        if claims.get("iss") != settings.issuer or settings.audience not in audiences:
            raise TokenRefused("issuer or audience")
        expires, issued = _moment(claims, "exp"), _moment(claims, "iat", now)
        if expires is None or issued is None:
            raise TokenRefused("no expiry")
        starts = max(_moment(claims, "nbf", issued) or issued, issued)
        if starts > now + settings.leeway_seconds or expires - issued > settings.max_lifetime_seconds:
            raise TokenRefused("not valid yet, or for too long")
        if now > expires + settings.leeway_seconds:
            raise TokenExpired("expired")
        return expires + settings.leeway_seconds


def _moment(claims: dict[str, Any], name: str, absent: float | None = None) -> float | None:
    value = claims.get(name, absent)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and abs(value) < _LAST_MOMENT):  # NaN is not less either
        raise TokenRefused(f"{name} is no number")
    return value


def _name(claims: dict[str, Any]) -> str:
    for claim in _NAMES:
        name = claims.get(claim)
        if isinstance(name, str) and name:
            if len(name) > 200 or not name.isprintable():
                break
            return name
    raise TokenRefused("no name")


def _scopes(claims: dict[str, Any]) -> frozenset[str]:
    value = claims.get("scope", claims.get("scp", ""))
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list) or not all(isinstance(scope, str) for scope in value):
        raise TokenRefused("scopes")
    return frozenset(value)


def _decoded(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)


def _object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; a name that stands twice in it would mean different things to different readers."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice")
        return found

    value = json.loads(text, object_pairs_hook=once)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value
