"""The token server's public keys (RFC 7517), read from its URL or a file and refreshed.

A token selects one of them by `kid`; keys inside tokens are ignored.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from typing import Any, Final

import aiohttp
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey

from headrace.config.http import JwtConfig
from headrace.errors import KeysUnavailable
from headrace.runtime import Clock, Readiness, Service

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 262_144
_MIN_RSA_BITS: Final = 2048
_AGAIN_SECONDS: Final = 30.0
_TIMEOUT_SECONDS: Final = 5.0
ALGORITHMS: Final = {"RS256": "RS256", "ES256": "ES256", "EdDSA": "EdDSA", "Ed25519": "EdDSA"}
"""The algorithm names in keys and tokens, and the algorithm of each."""
_CURVES: Final = {"P-256": "ES256", "Ed25519": "EdDSA"}

PublicKey = RSAKey | ECKey | OKPKey


@dataclasses.dataclass(frozen=True)
class UsableKey:
    """A key and its only permitted algorithm."""

    kid: str | None
    algorithm: str
    key: PublicKey = dataclasses.field(compare=False)
    thumbprint: str


class Keys(Service):
    """The current keys."""

    def __init__(self, settings: JwtConfig, clock: Clock) -> None:
        super().__init__("token keys")
        self._settings = settings
        self._clock = clock
        self._keys: list[UsableKey] | None = None
        self.generation = 0
        """Increases when the keys change; results of an older generation are no longer valid."""
        self._problem = "the token server's keys have not been read yet"
        self._tried_at = float("-inf")
        self._lock = asyncio.Lock()

    def readiness(self) -> Readiness:
        return Readiness(self._keys is not None, "" if self._keys is not None else self._problem)

    async def find(self, kid: str | None, algorithm: str) -> PublicKey | None:
        """Return the key of a token. If it is unknown, read the keys again, at most every 30 seconds.

        Raises:
            KeysUnavailable: No keys have been read so far.
        """
        found = self._known(kid, algorithm)
        if found is None:
            async with self._lock:
                found = self._known(kid, algorithm)
                if found is None and self._clock.monotonic() - self._tried_at >= _AGAIN_SECONDS:
                    await self._read()
                    found = self._known(kid, algorithm)
        if self._keys is None:
            raise KeysUnavailable()
        return found

    def _known(self, kid: str | None, algorithm: str) -> PublicKey | None:
        keys = [key for key in self._keys or () if key.algorithm == algorithm]
        if kid is None:
            return keys[0].key if len(keys) == 1 else None
        return next((key.key for key in keys if key.kid == kid), None)

    async def run(self) -> None:
        while True:
            async with self._lock:
                if self._clock.monotonic() - self._tried_at >= _AGAIN_SECONDS:
                    await self._read()
            await self._clock.sleep(_AGAIN_SECONDS if self._problem else self._settings.refresh_seconds)

    async def _read(self) -> None:
        """Replace the keys; if reading fails, keep the present ones."""
        self._tried_at = self._clock.monotonic()
        source = self._settings.jwks_url or self._settings.jwks_file
        try:
            keys = usable_keys(await self._text())
            if keys != self._keys:
                self._keys, self.generation = keys, self.generation + 1
            self._problem = ""
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as cause:
            self._problem = f"failed to read the token server's keys from {source}: {cause or type(cause).__name__}"
            log.warning("%s. Keeping the present keys, will retry", self._problem)

    async def _text(self) -> bytes:
        if self._settings.jwks_file:
            with self._settings.jwks_file.open("rb") as file:
                return file.read(_MAX_BYTES)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        session = aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
        async with session, session.get(str(self._settings.jwks_url), allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"it answers {response.status}")
            text = bytearray()
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > _MAX_BYTES:
                    raise ValueError(f"the response is larger than {_MAX_BYTES} bytes")
            return bytes(text)


def usable_keys(text: bytes) -> list[UsableKey]:
    """Return the keys of a key set that fit the algorithms; skip the others.

    Raises:
        ValueError: The text is not a key set, or none of its keys is usable.
    """
    document = json.loads(text)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is not a JSON Web Key Set")
    found = [key for entry in entries if (key := _usable(entry))]
    if not found:
        raise ValueError("it has no key for RS256, ES256 or EdDSA signatures")
    return found


def _usable(entry: Any) -> UsableKey | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig" or "d" in entry:
        return None
    with contextlib.suppress(JoseError, ValueError, TypeError, KeyError):
        key = JWKRegistry.import_key(entry)
        algorithm = None
        if isinstance(key, RSAKey) and key.public_key.key_size >= _MIN_RSA_BITS:
            algorithm = "RS256"
        elif isinstance(key, ECKey | OKPKey):
            algorithm = _CURVES.get(entry["crv"])
        named = entry.get("alg", algorithm)
        if isinstance(key, PublicKey) and algorithm and ALGORITHMS.get(str(named)) == algorithm:
            kid = entry.get("kid")
            return UsableKey(kid if isinstance(kid, str) else None, algorithm, key, key.thumbprint())
    return None
