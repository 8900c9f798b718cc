"""Internal topics take no records over HTTP: every endpoint that produces, in every form of its body."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest

from headrace.app.documents import every_endpoint
from tests.running_server import OpenServer
from yaml_table import table

SCOPES = {"writer": ["kafka:w"], "team": ["produce:*"], "boss": ["admin", "kafka:w"]}
SECURITY = {"mode": "token", "principals": {n: {"token": f"{n:->16}", "scopes": s} for n, s in SCOPES.items()}}
RECORDS: Any = [{"value": 1, "headers": {"headrace.dlq.topic": "p1", "Headrace.x": "y", "own": "h"}}]
FORMS = ["json", "keyed", "raw", "ndjson", "transaction", "keyed transaction", "dapr", "dapr bulk"]


def request(name: str, topic: str, form: str) -> bytes:
    """Return a request that writes one record."""
    path, kind, more = f"/producers/{topic}", "application/json", ""
    body = json.dumps({"records": RECORDS}).encode()
    if form == "raw":
        kind, body = "text/plain", b"1"
        more = "".join(f"X-Headrace-Header-{k}: {v}\r\n" for k, v in RECORDS[0]["headers"].items())
    elif form == "ndjson":
        kind, body = "application/x-ndjson", json.dumps(RECORDS[0]).encode()
    elif "dapr" in form:
        path = f"/{'v1.0-alpha1/publish/bulk' if 'bulk' in form else 'v1.0/publish'}/kafka/{topic}?"
        path += "&".join(f"metadata.{k}={quote(str(v))}" for k, v in RECORDS[0]["headers"].items())
        body = json.dumps([{"entryId": "1", "event": "x"}]).encode()
    elif "transaction" in form:
        path = "/transactions"
        body = json.dumps({"topics": [{"topic": "t", "records": []}, {"topic": topic, "records": RECORDS}]}).encode()
    if "keyed" in form:
        more = "Idempotency-Key: 0123456789abcdef\r\n"
    who = f"Authorization: Bearer {name:->16}\r\n" if name else ""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: {kind}\r\n{who}{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def status_of(server: Any, sent: bytes) -> int:
    reader, writer = await server.connect()
    writer.write(sent)
    response = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return {204: 200}.get(status := int(response.split()[1]), status)


def test_every_endpoint_that_produces_is_looked_at() -> None:
    """One that is added is added here too."""
    producing = {one.path for one in every_endpoint() if one.rule.action == "produce"}
    dapr = {"/v1.0/publish/{pubsub}/{topic}", "/v1.0-alpha1/publish/bulk/{pubsub}/{topic}"}
    assert producing == {"/producers/{topic}", "/transactions", *dapr}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "topic", "status"), table(__file__, "internal_topics_are_closed"))
async def test_internal_topics_are_closed(opened: OpenServer, name: str, topic: str, status: int, form: str) -> None:
    """To every token; dead letter topics are open for `admin`, and without authentication."""
    async with opened(**({"security": SECURITY} if name else {})) as server:
        assert await status_of(server, request(name, topic, form)) == status
        written = [record for record in server.kafka.producer.records if record.topic == topic]
        assert len(written) == (1 if status == 200 else 0)
        if written:
            names = [header for header, _ in written[0].headers or ()]
            reserved = [header for header in names if header.lower().startswith("headrace.")]
            assert len(reserved) == (2 if topic == "t.dlq" else 0), "only a dead letter has headers of Headrace"
            assert "own" in names
