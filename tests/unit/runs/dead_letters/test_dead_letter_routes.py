"""The endpoints that show dead letters: what they take."""

from __future__ import annotations

import pytest

from tests.running_server import OpenServer
from yaml_table import table


@pytest.mark.parametrize("query", table(__file__, "limits_cannot_be_lifted"))
async def test_limits_cannot_be_lifted(opened: OpenServer, query: str) -> None:
    """An invalid window is refused with the reason."""
    async with opened() as server:
        response = await server.get(f"/adm/dead-letters/t.dlq?{query}")
        assert (response.status, response.json["code"]) == (400, "ERR11004")
        assert (await server.get("/adm/dead-letters/t.dlq?limit=500")).status == 200
