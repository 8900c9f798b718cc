"""Keys from a token server's URL: fetched, rotated, and not asked for too often (row J3)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from joserfc.jwk import ECKey, OctKey, RSAKey

from headrace.config.http import JwtConfig
from headrace.errors import KeysUnavailable
from headrace.http.auth.keys import Keys, usable_keys
from headrace_devkit.testing import ManualClock

FIRST, SECOND = (ECKey.generate_key("P-256", {"kid": kid}) for kid in ("first", "second"))


class Site:
    """A token server."""

    def __init__(self) -> None:
        self.response = shown(FIRST)
        self.status = 200
        self.asked = 0

    async def serve(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.response, status=self.status, headers={"Location": "/elsewhere"})


def shown(*keys: Any) -> bytes:
    return json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[Site, Keys, ManualClock]]:
    site, clock = Site(), ManualClock()
    app = web.Application()
    app.router.add_get("/{tail:.*}", site.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    url = f"http://{host}:{port}/jwks"
    try:
        yield site, Keys(JwtConfig(issuer="i", audience="a", jwks_url=url), clock), clock
    finally:
        await runner.cleanup()


async def test_a_new_key_is_found_and_unknown_ones_do_not_make_a_flood() -> None:
    """At most one question in 30 seconds, whatever callers send."""
    async with opened() as (site, keys, clock):
        assert await keys.find("first", "ES256")
        for number in range(1000):
            assert await keys.find(str(number), "ES256") is None
        assert site.asked == 1
        site.response = shown(FIRST, SECOND)
        await clock.advance(30)
        found = await asyncio.gather(*(keys.find("second", "ES256") for _ in range(20)))
        assert all(found)
        assert site.asked == 2
        assert await keys.find("second", "EdDSA") is None


@pytest.mark.parametrize(
    ("status", "response"),
    [(500, b""), (302, b""), (200, b"[]"), (200, b"{"), (200, b'{"keys": []}'), (200, b" " * 10_000_000)],
)
async def test_known_keys_are_used_on_when_the_server_is_ill(status: int, response: bytes) -> None:
    """Errors, redirects, no key set, none of use, 10 MB."""
    async with opened() as (site, keys, clock):
        site.status, site.response = status, response
        with pytest.raises(KeysUnavailable):
            await keys.find("first", "ES256")
        assert not keys.readiness().ready
        site.status, site.response = 200, shown(FIRST)
        await clock.advance(31)
        assert await keys.find("first", "ES256")
        assert keys.readiness().ready
        site.status, site.response = status, response
        await clock.advance(3600)
        assert await keys.find("second", "ES256") is None
        assert await keys.find("first", "ES256")
        assert keys.readiness().ready


async def test_keys_are_read_at_start_and_again() -> None:
    """Without any request; so the first request does not wait, and a key that was taken back is gone."""
    async with opened() as (site, keys, clock):
        await keys.start()
        while not keys.readiness().ready:  # noqa: ASYNC110 the response comes over a socket
            await asyncio.sleep(0)
        site.response = shown(SECOND)
        await clock.advance(301)
        while not await keys.find("second", "ES256"):  # noqa: ASYNC110 the response comes over a socket
            await asyncio.sleep(0)
        assert await keys.find("first", "ES256") is None
        await keys.stop()


@pytest.mark.filterwarnings("ignore:Key size")
def test_only_keys_fit_for_signatures_are_used() -> None:
    """No secrets, no private keys, no short keys, no other curves, none for encryption or another algorithm."""
    rsa = RSAKey.generate_key(2048, {"kid": "good"}).as_dict(private=False)
    entries = [
        OctKey.generate_key(256, {"kid": "secret"}).as_dict(),
        RSAKey.generate_key(2048, {"kid": "private"}).as_dict(private=True),
        RSAKey.generate_key(1024, {"kid": "short"}).as_dict(private=False),
        ECKey.generate_key("P-384", {"kid": "curve"}).as_dict(private=False),
        {**rsa, "kid": "encryption", "use": "enc"},
        {**rsa, "kid": "other", "alg": "RS512"},
        {"kty": "RSA"},
        "text",
        {**rsa, "use": "sig", "alg": "RS256"},
    ]
    found = usable_keys(json.dumps({"keys": entries}).encode())
    assert [(key.kid, key.algorithm) for key in found] == [("good", "RS256")]
