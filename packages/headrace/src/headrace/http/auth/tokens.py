"""Validates signed tokens (RFC 7519) with fixed algorithms; each key is bound to one of them (RFC 8725)."""

import base64
import json
from typing import Any, Final

from cachetools import LRUCache
from joserfc import jws
from joserfc.errors import ExpiredTokenError, JoseError, UnsupportedAlgorithmError
from joserfc.jwt import JWTClaimsRegistry

from headrace.config.http import JwtConfig
from headrace.http.auth.keys import ALGORITHMS, Keys
from headrace.http.auth.principals import Principal, TokenExpired, TokenRefused
from headrace.runtime import Clock

_MAX_CHARACTERS: Final = 8192
_MAX_CACHED: Final = 10_000
_TYPES: Final = (None, "JWT", "jwt", "at+jwt", "application/at+jwt")
_CHECKED: Final = ("iss", "aud", "exp", "nbf", "iat")
_NAMES: Final = ("client_id", "cid", "azp", "user_id", "uid", "sub")


class _Registry(jws.JWSRegistry):
    max_header_length = 2048

    def get_alg(self, name: str) -> Any:
        # The library warns about EdDSA, because RFC 9864 names the curve. Here the key decides the curve.
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(name)
        return self.algorithms[name]


_REGISTRY: Final = _Registry(strict_check_header=False)


class Tokens:
    """Validates tokens; a valid one is cached until it expires."""

    def __init__(self, settings: JwtConfig, keys: Keys, clock: Clock) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock
        self._known: LRUCache[str, Principal] = LRUCache(_MAX_CACHED)
        self._generation = keys.generation
        self._rules = JWTClaimsRegistry(
            now=clock.time,  # type: ignore[arg-type]  # fractions of a second are fine
            leeway=settings.leeway_seconds,  # type: ignore[arg-type]
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "value": settings.audience},
            exp={"essential": True},
        )

    async def principal_of(self, token: str) -> Principal:
        """Return the principal of a token.

        Raises:
            TokenRefused: It is not valid; `TokenExpired` if it was valid earlier.
            KeysUnavailable: No keys have been read so far.
        """
        if known := self.known(token):
            return known
        if self._known.pop(token, None):
            raise TokenExpired("expired")
        claims = await self._claims(token)
        ends_at = self._check(claims)
        self._known[token] = principal = Principal(_name(claims), _scopes(claims), expires_at=ends_at)
        return principal

    def known(self, token: str) -> Principal | None:
        """Return the principal of a cached token that has not expired."""
        if self._keys.generation != self._generation:
            self._known.clear()
            self._generation = self._keys.generation
        known = self._known.get(token)
        return known if known and self._clock.time() <= known.expires_at else None

    async def _claims(self, token: str) -> dict[str, Any]:
        if len(token) > _MAX_CHARACTERS or token.count(".") != 2:
            raise TokenRefused("not a token")
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
        """Return when the token expires, including the leeway."""
        given = {name: claims[name] for name in _CHECKED if claims.get(name) is not None}
        try:
            self._rules.validate(given)
            expires = given["exp"]
            issued = given.get("iat", self._clock.time())
            if expires > issued + self._settings.max_lifetime_seconds:
                raise TokenRefused("valid for too long")
        except ExpiredTokenError as cause:
            raise TokenExpired("expired") from cause
        except (JoseError, OverflowError) as cause:
            raise TokenRefused(str(cause)) from cause
        return float(expires + self._settings.leeway_seconds)


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
    """Return a JSON object; a repeated name is an error, because parsers differ in the value they use."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name is repeated")
        return found

    value = json.loads(text, object_pairs_hook=once)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
