"""The registry client: how often it sends a request, and what happens when the registry fails."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from headrace.errors import RegistryUnavailable, SchemaInvalid, SchemaNotFound
from tests.raw_server import Authority
from tests.unit.formats.conftest import Setting
from yaml_table import table


async def test_latest_is_requested_again_after_its_time_and_a_version_is_not(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """Only the latest version can change; while the registry is down, known schemas are still used."""
    async with serving() as it:
        it.server.add("s", 1, '"int"')
        for _ in range(3):
            assert (await it.client.of_subject("s")).id == (await it.client.of_subject("s", 1)).id == 1
        it.server.add("s", 2, '"long"')
        await it.clock.advance(29)
        assert (await it.client.of_subject("s")).id == 1
        await it.clock.advance(1)
        assert (await it.client.of_subject("s")).id == 2
        assert (await it.client.of_subject("s", 1)).id == 1
        assert len(it.server.requests) == 3
        it.server.broken = web.Response(status=503)
        await it.clock.advance(31)
        assert (await it.client.of_subject("s")).id == 2
        with pytest.raises(RegistryUnavailable):
            await it.client.of_subject("other")


async def test_not_found_is_remembered_for_a_while(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """A client that repeats a wrong name does not reach the registry each time."""
    async with serving() as it:
        for _ in range(3):
            with pytest.raises(SchemaNotFound, match="subject s"):
                await it.client.of_subject("s")
        assert len(it.server.requests) == 1
        it.server.add("s", 1, '"int"')
        await it.clock.advance(30)
        assert (await it.client.of_subject("s")).id == 1


async def test_callers_who_want_the_same_share_one_request(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """A burst of look-ups of a new schema is one request to the registry."""
    async with serving() as it:
        it.server.add("s", 1, '"int"')
        it.server.gate.clear()
        callers = [asyncio.ensure_future(it.client.by_id(1)) for _ in range(20)]
        await asyncio.sleep(0)
        it.server.gate.set()
        assert {found.id for found in await asyncio.gather(*callers)} == {1}
        assert len(it.server.requests) == 1


async def test_a_caller_who_leaves_does_not_take_the_others_along(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """If the caller that sent the request is cancelled, the others get an error, and the next call sends it again."""
    async with serving() as it:
        it.server.add("s", 1, '"int"')
        it.server.gate.clear()
        first, second = (asyncio.ensure_future(it.client.by_id(1)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(RegistryUnavailable, match="look-up was cancelled"):
            await second
        it.server.gate.set()
        assert (await it.client.by_id(1)).id == 1


@pytest.mark.parametrize(
    ("status", "body", "user", "problem"), yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text())
)
async def test_an_invalid_response_is_unavailable_and_not_kept(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], status: int, body: str, user: str, problem: str
) -> None:
    """A wrong URL or a rejected login is not "not found"; no redirect is followed, and no password shown."""
    login = {"username": user, "password": "canary"} if user else {}
    async with serving(**login) as it:
        it.server.add("s", 1, '"int"')
        it.server.broken = web.Response(status=status, body=body.encode("latin-1"), headers={"Location": "/elsewhere"})
        with pytest.raises(RegistryUnavailable, match=problem) as refused:
            await it.client.by_id(1)
        assert "canary" not in str(refused.value)
        assert it.server.requests == ["GET /schemas/ids/1"]
        it.server.broken = None
        assert (await it.client.by_id(1)).id == 1


async def test_a_registry_that_is_down_or_hangs_is_unavailable(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """The wait has the limit of the configuration; a refused connection has the address and what to do."""
    async with serving(timeout_seconds=0.05) as it:
        it.server.gate.clear()
        with pytest.raises(RegistryUnavailable, match=r"no response within 0\.05 s"):
            await it.client.by_id(1)
    async with serving(url="http://127.0.0.1:1") as it:
        with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1 .*headrace dev up"):
            await it.client.by_id(1)


async def test_registering_looks_up_first_and_makes_latest_new(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """Text the subject has is not registered again; new text becomes the latest version at once."""
    async with serving() as it:
        it.server.add("s", 1, '"int"')
        assert (await it.client.of_subject("s")).id == 1
        assert (await it.client.register("s", '"int"')).id == 1
        new = await it.client.register("s", '"long"')
        assert await it.client.of_subject("s") == new
        asked = len(it.server.requests)
        assert await it.client.register("s", '"long"') == new
        assert len(it.server.requests) == asked
        with pytest.raises(SchemaInvalid, match="not compatible with version 1"):
            await it.client.register("s", "incompatible")


async def test_subjects_travel_as_one_path_step_and_credentials_with_them(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """A slash in a subject does not change the path; basic authentication is sent."""
    async with serving(username="ann", password="secret") as it:
        it.server.add("a b/c", 1, '"int"')
        assert (await it.client.of_subject("a b/c")).id == 1
        assert it.server.authorizations == {"Basic YW5uOnNlY3JldA=="}


async def test_texts_of_requests_take_bounded_memory(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected ones are kept by their digest, and registered ones within a limit of bytes."""
    monkeypatch.setattr("headrace.formats.registry._CACHE_BYTES", 30_000)
    async with serving() as it:
        for number in range(20):
            text = json.dumps({"type": "string", "doc": f"{number:x>1000}"})
            await it.client.register("orders-value", text)
        entries = it.client._cache._entries
        assert 0 < len(entries) < 10
        assert max(len(str(key)) for key in entries) < 500


@pytest.mark.parametrize(
    ("shown", "host", "ca", "problem"),
    table(__file__, "tls_that_fails"),
    ids=["trusted", "authority", "expired", "host-name", "plain-text"],
)
async def test_tls_that_fails_is_named_with_the_setting(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
    tmp_path: Path,
    shown: str,
    host: str,
    ca: str,
    problem: str,
) -> None:
    """The registry's certificate is always checked, and the sentence names what to correct."""
    authority, _ = Authority(tmp_path), Authority(tmp_path, "other")
    context = authority.issue(shown, host, days=-1 if shown == "expired" else 1) if shown else None
    async with serving(context, tls={"ca": tmp_path / f"{ca}.pem"}) as it:
        it.server.add("s", 1, '"int"')
        if not problem:
            assert (await it.client.by_id(1)).id == 1
            return
        with pytest.raises(RegistryUnavailable, match=problem):
            await it.client.by_id(1)
        assert not it.server.requests


async def test_a_registry_that_requires_a_certificate_gets_that_of_the_settings(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], tmp_path: Path
) -> None:
    """Without one the sentence names the setting."""
    authority = Authority(tmp_path)
    context = authority.issue("server")
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue("me")
    files = {"certificate": tmp_path / "me.pem", "key": tmp_path / "me.key"}
    async with serving(context, tls={"ca": authority.file, **files}) as it:
        it.server.add("s", 1, '"int"')
        assert (await it.client.by_id(1)).id == 1
    async with serving(context, tls={"ca": authority.file}) as it:
        with pytest.raises(RegistryUnavailable, match=r"schema_registry\.tls\.certificate"):
            await it.client.by_id(1)
