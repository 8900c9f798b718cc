"""The API document: it is one, it says what is served, and what it says is so."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from openapi_spec_validator import OpenAPIV31SpecValidator

from headrace.admin.health import routes
from headrace.app.documents import every_endpoint, whole_document
from headrace.http.endpoint import endpoints_of
from headrace.runtime import Readiness
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace_dialects.light4j.redelivery_routes import RedeliveryEndpoints
from tests.running_server import OpenServer, RunningServer

RECORD = b'{"records":[{"value":1}]}'
NO_KEYS = {"mode": "jwt", "jwt": {"issuer": "i", "audience": "a", "jwks_url": "http://127.0.0.1:1/"}}
HEAD, CLAIMS = b'{"alg":"ES256"}', b"{}"
SIGNED = ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (HEAD, CLAIMS, b"0" * 64))
OPERATIONS = {(one.method, one.path): one for one in every_endpoint()}
DOCUMENT = json.loads(json.dumps(whole_document()))
ALL = [one for one in every_endpoint() if one.described]


def request(method: str, path: str, more: str = "", body: bytes = RECORD, host: str = "Host: h\r\n") -> bytes:
    path = re.sub(r"\{.*?\}", "t", path.replace("{partition}", "0"))
    head = f"{method} {path} HTTP/1.1\r\n{host}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


async def test_the_document_is_one_as_json_and_as_yaml(server: RunningServer) -> None:
    for path, kind, read in (
        ("/spec.yaml", "text/yaml", lambda text: yaml.load(text, yaml.CSafeLoader)),
        ("/openapi.json", "application/json", json.loads),
    ):
        response = await server.get(path)
        assert response.headers["content-type"].startswith(kind)
        assert read(response.body) == DOCUMENT
    assert DOCUMENT["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_every_endpoint_is_in_the_document(opened: OpenServer) -> None:
    """With the scopes of its rule, and under its own id and path; nothing is served that is not described."""
    paths = DOCUMENT["paths"]
    assert sum(map(len, paths.values())) == len(ALL)
    for one in ALL:
        scopes = [alternative["kafka_auth"] for alternative in paths[one.path][one.method.lower()]["security"]]
        assert scopes == [[scope] for scope in one.rule.any_of]
    assert len({one.id for one in every_endpoint()}) == len(OPERATIONS) == len(every_endpoint())


def test_what_changes_state_is_audited() -> None:
    """Records have notes of their own, and a report is a note. A statement changes nothing."""
    silent = {one.id for one in every_endpoint() if one.changes and not one.audited}
    of_instances = {one.id for one in endpoints_of(ActiveEndpoints) if one.changes}
    assert silent - of_instances == {
        "postData",
        "postTransaction",
        "daprPublish",
        "daprPublishBulk",
        "ConsumerActiveAudit",
        "DLTopicReplayActive",
        "DLQProducer",
        "query",
        "runQueryStream",
        "closeQuery",
        "runActiveQuery",
    }


def test_what_active_consumers_declare() -> None:
    """Reads wait; and every operation on an instance is served by the process that has it."""
    reads = ["/consumers/{group}/instances/{instance}/records", "/consumers/deadLetter/active"]
    assert sorted(one.path for one in OPERATIONS.values() if one.long_poll) == sorted(reads)
    for one in OPERATIONS.values():
        assert one.affinity == (("group", "instance") if "instance" in one.parameters else ()), one.path


async def test_nothing_is_changed_for_a_page_of_another_site(server: RunningServer) -> None:
    """Every operation that changes something, whatever its method; an image tag sends a GET without an Origin."""

    for (method, path), operation in OPERATIONS.items():
        for more in ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site", "Origin: http://evil.example"):
            refused = operation.changes or more.startswith("Origin")
            response = await server.ask(request(method, path, f"{more}\r\n"))
            assert (response.status == 403) is refused, (method, path, more)
            assert not refused or response.json["code"] == "ERR40034"
        for site in ("same-origin", "none"):
            response = await server.ask(request(method, path, f"Sec-Fetch-Site: {site}\r\n"))
            assert response.status != 403, (method, path)

    assert RedeliveryEndpoints.redeliver_by_get.changes


async def test_the_page_asks_no_other_site(server: RunningServer) -> None:
    """Everything it names is served here, and its policy forbids the rest."""
    page = await server.get("/specui.html")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="([^"]*)"', page.body.decode())
    assert len(named) == 3
    for name in named:
        response = await server.get(f"/{name}")
        assert response.status == 200
        assert "text/css" in response.headers["content-type"] or "javascript" in response.headers["content-type"]
    start = (await server.get("/specui/start.js")).body.decode()
    assert "validatorUrl: null" in start
    assert (await server.get("/" + re.findall(r'url: "([^"]*)"', start)[0])).json == DOCUMENT
    assert (await server.get("/specui/..%2f__init__.py")).status == 404


Responses = AsyncIterator[tuple[tuple[str, str], Any]]


async def open_responses(opened: Any) -> Responses:
    """Provoke what the server answers at every endpoint."""
    async with opened(max_body_bytes=1000) as server:
        for method, path in OPERATIONS:
            for sent in (
                request(method, path),
                request(method, path, body=b" " * 2000),
                request(method, path, host="Host: h\r\nHost: h\r\n"),
                request(method, path, host="Host: elsewhere\r\n"),
                request(method, path, "".join(f"X-{n}: 1\r\n" for n in range(101))),
                request(method, path, "Content-Encoding: gzip\r\n"),
                request(method, f"{path}?what=this"),
            ):
                yield (method, path), await server.ask(sent)
        server.services["kafka"] = Readiness(False, "for this test")
        server.web._application.gate.draining = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes, "hanging_consumers", lambda: ["for this test"])
            for method, path in OPERATIONS:
                yield (method, path), await server.ask(request(method, path))


async def guarded_responses(opened: Any) -> Responses:
    """Provoke what endpoints answer to those who may not, or may not so often."""
    tokens = {f"{'-'.join(place):->16}": place for place in OPERATIONS}
    principals = {f"n{number}": {"token": token} for number, token in enumerate(tokens)}
    security = {"mode": "token", "requests_per_second": 2, "principals": principals}
    async with opened(security=security) as server:
        for token, (method, path) in tokens.items():
            for more in ("", *[f"Authorization: Bearer {token}\r\n"] * 3):
                yield (method, path), await server.ask(request(method, path, more))
    async with opened(security=NO_KEYS) as server:
        for method, path in OPERATIONS:
            response = await server.ask(request(method, path, f"Authorization: Bearer {SIGNED}\r\n"))
            yield (method, path), response


def code_of(response: Any) -> str:
    is_json = response.headers.get("content-type") == "application/json"
    return response.json.get("code", "") if is_json and isinstance(response.json, dict) else ""


async def test_responses_of_the_server_are_documented(opened: OpenServer) -> None:
    """Nothing else is answered at any endpoint, and every code is documented for its status."""
    paths = DOCUMENT["paths"]
    described = {(one.method, one.path): paths[one.path][one.method.lower()]["responses"] for one in ALL}
    for responses in (open_responses(opened), guarded_responses(opened)):
        async for place, response in responses:
            if place not in described:
                continue
            status = str(response.status)
            assert status in described[place], (place, status)
            if code := code_of(response):
                schema = described[place][status]["content"]["application/json"]["schema"]
                schema = schema.get("anyOf", [schema])[-1]
                assert code in schema["allOf"][1]["properties"]["code"]["enum"], (place, status, code)
