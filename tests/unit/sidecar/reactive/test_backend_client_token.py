"""Tokens for a backend: kept until shortly before they expire, requested by one task at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.config.backend import OAuth
from headrace.errors import DestinationUnavailable
from headrace.sidecar.reactive.backend_connection import BackendResponse
from headrace.sidecar.reactive.token import Token
from headrace_devkit.testing import ManualClock
from yaml_table import table

OAUTH = OAuth.model_validate(
    {"token_url": "https://tokens.example/t?key=canary", "client_id": "a", "client_secret": "canary"}
)


class Giver:
    """A token server in memory."""

    def __init__(self, **body: Any) -> None:
        self.responses: list[BackendResponse] = []
        self.body: dict[str, Any] = {"token_type": "Bearer", "expires_in": 100, **body}
        self.requests = 0
        self.gate: asyncio.Event | None = None
        self.clock = ManualClock()
        self.token = Token(OAUTH, self.ask, lambda: None, self.clock)

    async def ask(self, form: bytes) -> BackendResponse:
        self.requests += 1
        number = self.requests
        if self.gate:
            await self.gate.wait()
        if self.responses:
            return self.responses.pop(0)
        return BackendResponse(200, {}, json.dumps({"access_token": f"t{number}", **self.body}).encode())


@pytest.mark.parametrize(("lasts", "renewed"), [(100, 90.0), (3600, 3570.0), ("100", 90.0), (None, 270.0)])
async def test_a_token_is_renewed_shortly_before_its_end(lasts: Any, renewed: float) -> None:
    """A tenth of its life before, 30 seconds at most; five minutes where the server does not say."""
    giver = Giver(expires_in=lasts)
    assert await giver.token.value() == "t1"
    await giver.clock.advance(renewed - 1)
    assert await giver.token.value() == "t1"
    await giver.clock.advance(1)
    assert await giver.token.value() == "t2"


async def test_many_tasks_request_a_token_once() -> None:
    """Tasks that wait meanwhile get the same token, or the same error."""
    giver = Giver()
    giver.gate = asyncio.Event()
    waiting = [asyncio.ensure_future(giver.token.value()) for _ in range(20)]
    await giver.clock.settle()
    giver.gate.set()
    assert set(await asyncio.gather(*waiting)) == {"t1"}
    await giver.clock.advance(1000)
    giver.gate.clear()
    giver.responses.append(BackendResponse(503, {}, b""))
    waiting = [asyncio.ensure_future(giver.token.value()) for _ in range(20)]
    await giver.clock.settle()
    await giver.clock.advance(1)
    giver.gate.set()
    refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, DestinationUnavailable) for one in refused)
    assert giver.requests == 2
    assert await giver.token.value() == "t3"


async def test_a_cancelled_request_is_repeated_by_the_next_task() -> None:
    """A cancelled task does not block the others."""
    giver = Giver()
    giver.gate = asyncio.Event()
    first, second = asyncio.ensure_future(giver.token.value()), asyncio.ensure_future(giver.token.value())
    await giver.clock.settle()
    first.cancel()
    giver.gate.set()
    assert await second == "t2"


async def test_a_token_the_backend_refused_is_forgotten_unless_it_has_been_replaced() -> None:
    """Many requests are refused with one token; it is replaced once."""
    giver = Giver()
    old = await giver.token.value()
    giver.token.forget(old)
    assert await giver.token.value() == "t2"
    giver.token.forget(old)
    assert await giver.token.value() == "t2"


@pytest.mark.parametrize(
    ("status", "body", "says"), table(__file__, "a_response_without_a_token_is_reported_without_its_content")
)
async def test_a_response_without_a_token_is_reported_without_its_content(status: int, body: str, says: str) -> None:
    """The status and the standard's own word for the error, never the rest."""
    giver = Giver()
    giver.responses.append(BackendResponse(status, {}, body.replace("DEEP", "[" * 100_000).encode()))
    with pytest.raises(DestinationUnavailable, match=says) as failed:
        await giver.token.value()
    assert "canary" not in str(failed.value.body())
