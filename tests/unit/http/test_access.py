"""Who may use which endpoint: every route of the code against the callers that `callers.yaml` names for it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml

from headrace.app.documents import every_endpoint
from headrace.http.endpoint import OPEN, Endpoint
from tests.running_server import OpenServer

CALLERS = yaml.safe_load(Path(__file__).with_name("callers.yaml").read_text())
TOKENS = CALLERS["scopes"]
SECURITY = {"mode": "token", "principals": {n: {"token": f"{n:->16}", "scopes": s} for n, s in TOKENS.items()}}
ALLOWED = {operation: row["callers"] for row in CALLERS["served"] for operation in row["operations"]}
RECORD = b'{"records":[{"value":1}]}'


def request(method: str, path: str, more: str = "", body: bytes = RECORD) -> bytes:
    path = re.sub(r"\{.*?\}", "t", path)
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


def bearer(name: str) -> str:
    return f"Authorization: Bearer {name:->16}\r\n"


@pytest.mark.parametrize("endpoint", every_endpoint(), ids=lambda endpoint: endpoint.id)
async def test_the_matrix_of_routes_and_scopes(opened: OpenServer, endpoint: Endpoint) -> None:
    """Row J5: 401 for strangers, 403 that names the scope and nothing else, a response of the endpoint for the rest."""
    rule, method, path = endpoint.rule, endpoint.method, endpoint.path
    path += "?group=other&topic=other" if endpoint.id == "DLTopicReplayActive" else ""
    async with opened(security=SECURITY) as server:
        stranger = await server.ask(request(method, path))
        assert (stranger.status == 401) is (rule != OPEN)
        for name in TOKENS:
            response = await server.ask(request(method, path, bearer(name)))
            if name in ALLOWED[endpoint.id]:
                assert response.status not in (401, 403), name
            else:
                assert (response.status, response.json["code"]) == (403, "ERR10005"), name
                assert set(response.json["metadata"]) == {"reason", "retriable", "scope"}
                assert response.json["description"] == f"missing scope {response.json['metadata']['scope']}"


@pytest.mark.parametrize(
    "endpoint",
    [e for e in every_endpoint() if e.rule.also or (e.rule.action and not e.rule.parameter)],
    ids=lambda e: e.id,
)
async def test_the_right_scope_on_another_topic(opened: OpenServer, endpoint: Endpoint) -> None:
    """Row J5 for topics that a body or a query names: a route that is not in the table fails."""
    status, more, body = CALLERS["foreign"][endpoint.id]
    path = endpoint.path.replace("{group}", "other") + more
    async with opened(security=SECURITY) as server:
        sent = json.dumps(body).encode() if body else b""
        response = await server.ask(request(endpoint.method, path, bearer("other"), sent))
        assert not server.kafka.producer.records
        assert response.status == status if status else response.status >= 400, response.body
        assert status != 403 or response.json["code"] == "ERR10005"
        assert status != 200 or not re.search(rb'"t\b', response.body), response.body


async def test_credentials_and_their_codes(opened: OpenServer) -> None:
    """The codes of sidecar.md 2.8; a 401 says what it wants; nothing reaches Kafka but what may."""
    async with opened(security=SECURITY) as server:
        for template, status, code in CALLERS["credentials"]:
            more = template.format(**{name: f"{name:->16}" for name in TOKENS})
            response = await server.ask(request("POST", "/producers/t", more))
            assert (response.status, response.json.get("code", "")) == (status, code), more
            assert (response.headers.get("www-authenticate") == "Bearer") is (status == 401)
        assert len(server.kafka.producer.records) == sum(status == 200 for _, status, _ in CALLERS["credentials"])


async def test_strangers_do_not_learn_which_paths_there_are(opened: OpenServer) -> None:
    """401 for every path; 404 and 405 are for those who are known."""
    async with opened(security=SECURITY) as server:
        for path in ("/nowhere", "/producers", "/health", "/metrics/", "//live", "/Live"):
            assert (await server.ask(request("GET", path))).status == 401, path
            assert (await server.ask(request("GET", path, bearer("nothing")))).status == 404, path
        assert (await server.ask(request("GET", "/producers/t", bearer("nothing")))).status == 405
        assert (await server.ask(request("GET", "/lively"))).status == 404


async def test_readiness_tells_strangers_only_whether(opened: OpenServer) -> None:
    """Names of services and reasons are for those who are known; a bad token does not fail a probe."""
    async with opened(security=SECURITY) as server:
        assert (await server.get("/ready")).json == {"ready": True}
        assert (await server.ask(request("GET", "/ready", "Authorization: Bearer wrong\r\n"))).json == {"ready": True}
        assert "services" in (await server.ask(request("GET", "/ready", bearer("nothing")))).json


async def test_one_principal_has_a_limit_of_requests_in_flight(opened: OpenServer) -> None:
    """429 with Retry-After for the one more; others go on, and so does this one when it has its responses."""
    async with opened(security={**SECURITY, "max_in_flight": 2}) as server:
        server.kafka.producer.hold()
        waiting = [asyncio.create_task(server.ask(request("POST", "/producers/t", bearer("writer")))) for _ in range(2)]
        while len(server.kafka.producer.records) < 2:  # noqa: ASYNC110 the fake has no event for the second one
            await asyncio.sleep(0)
        response = await server.ask(request("POST", "/producers/t", bearer("writer")))
        assert (response.status, response.json["code"], response.headers["retry-after"]) == (429, "ERR40004", "1")
        assert (await server.ask(request("GET", "/metrics", bearer("scraper")))).status == 200
        assert (await server.ask(request("GET", "/ready", bearer("writer")))).status == 200
        server.kafka.producer.release()
        assert [response.status for response in await asyncio.gather(*waiting)] == [200, 200]
        assert (await server.ask(request("POST", "/producers/t", bearer("writer")))).status == 200


async def test_a_flood_of_bad_tokens_does_not_keep_good_ones_out(opened: OpenServer) -> None:
    """Row J8: each good one among them is served, and probes are answered at once."""
    async with opened(security=SECURITY) as server:
        bad, good = (
            request("GET", "/metrics", bearer("wrong"), b""),
            request("POST", "/producers/t", bearer("writer")),
        )
        guesses = [asyncio.create_task(server.ask(bad)) for _ in range(60)]
        await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
        responses = [await server.ask(good) for _ in range(10)]
        assert [response.status for response in responses] == [200] * 10
        for name in ("wrong", "nothing"):
            assert (await server.ask(request("GET", "/ready", bearer(name)))).json == {"ready": True}
        assert not all(guess.done() for guess in guesses), "the wrong ones are slowed"
        assert {(await guess).status for guess in guesses} == {401, 429}
