"""Row H10: methods and spellings of paths; no spelling of one path reaches another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from tests.running_server import OpenServer, RunningServer

RECORD = b'{"records":[{"value":1}]}'
SECURITY = {"mode": "token", "principals": {"loader": {"token": "a-token-of-16-or-more", "scopes": ["produce:mine"]}}}
SPELLINGS = yaml.safe_load(Path(__file__).with_name("paths.yaml").read_text())
"""What is asked for, and the topic that may be written then."""
METHODS = ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "HEAD", "PROPFIND", "post", "Get", "get"]


def post(path: str, method: str = "POST", more: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(RECORD)}\r\n\r\n".encode("latin-1") + RECORD


async def test_no_spelling_reaches_another_topic(opened: OpenServer) -> None:
    """What may be written is written under the one name that the token allows; the rest is refused."""
    bearer = "Authorization: Bearer a-token-of-16-or-more\r\n"
    async with opened(security=SECURITY) as server:
        for name in {*filter(None, SPELLINGS.values())} - {*server.kafka.brokers.topics}:
            server.kafka.brokers.create_topic(name)
        for path, topic in SPELLINGS.items():
            server.kafka.producer.records.clear()
            response = await server.ask(post(path, more=bearer))
            assert [record.topic for record in server.kafka.producer.records] == ([topic] if topic else []), path
            assert response.status == 200 if topic else response.status in (400, 403, 404), path


async def test_other_methods_are_refused(server: RunningServer) -> None:
    """405 with those that are right, or 400 for what is no method; a wish to override the method is not heard."""
    for method in METHODS:
        reader, writer = await server.connect()
        writer.write(post("/producers/t", method, "X-HTTP-Method-Override: POST\r\n"))
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
        assert ("HTTP/1.1 405" in head and "allow: POST" in head) or "HTTP/1.1 400" in head, method
    assert server.kafka.producer.records == []


@pytest.mark.parametrize(
    ("request_line", "text"),
    [
        ("POST /producer/orders", "no endpoint has this path; all are at /specui.html"),
        ("PUT /topics/orders", "this path takes DELETE, GET, HEAD, PATCH"),
    ],
)
async def test_an_unknown_path_says_where_all_are(server: RunningServer, request_line: str, text: str) -> None:
    method, path = request_line.split()
    response = await server.ask(post(path, method))
    assert (response.status, response.json["code"]) in ((404, "ERR10007"), (405, "ERR10008"))
    assert response.json["description"] == f"{method} {path}: {text}"
