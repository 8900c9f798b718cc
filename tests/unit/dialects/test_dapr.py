"""Dapr: what an application's answers mean, what it publishes, and what the paths of other products are here."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.config.backend import BackendConfig
from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import Delivery, Reply
from headrace.delivery.policy import judge
from headrace.errors import KafkaUnavailable
from headrace.formats.choice import Codecs
from headrace.records import Record, TopicPartition
from headrace.sidecar.reactive.backend_connection import BackendResponse
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.reactive.http_destination import HttpDestination
from headrace_devkit.testing import ManualClock
from headrace_dialects.foreign_paths import own_of, rows
from tests.running_server import RunningServer
from yaml_table import table

CODECS = Codecs(None)  # type: ignore[arg-type]
RECORDS = [Record("t", 0, n, 0, b"k", b'{"n":%d}' % n) for n in range(2)]
DOCS = Path(__file__).parents[3] / "docs"
CONTRACT = Path(__file__).parents[1] / "http" / "api_contract.json"


def replies(mode: str, status: int, body: str, records: list[Record], **retry: Any) -> tuple[list[Reply], Any]:
    """Return the replies for records, and the JSON of the request."""
    backend = BackendConfig(url="http://localhost/", mode=mode, answers="dapr")  # type: ignore[arg-type]
    payloads = PayloadDecoder(CODECS.for_reading("string"), "string", CODECS.for_reading("json"), "json")
    to = HttpDestination("c", backend, RetryConfig(**retry), payloads, ManualClock(1_800_000_000))
    posts: list[bytes] = []

    async def post(sent: bytes, _: bytes) -> BackendResponse:
        posts.append(sent)
        return BackendResponse(status, {}, body.encode())

    to.client.post = post  # type: ignore[method-assign]
    found = asyncio.run(to.deliver(Delivery("g", TopicPartition("t", 0), 1, records, 1)))
    return list(found), json.loads(posts[0])


@pytest.mark.parametrize(("status", "body", "error"), table(__file__, "an_answer_to_one_record"))
def test_an_answer_to_one_record(status: int, body: str, error: str) -> None:
    """A word that is not known is no success, and a text without a status is one, as in Dapr."""
    (reply,), request = replies("cloudevents_structured", status, body, RECORDS[:1])
    assert (reply.error, request["data"]) == (error, {"n": 0})
    lasting = judge(RECORDS[:1], [reply], RetryConfig(), attempt=1)
    assert [*lasting] == [{"": "delivered", "RETRY": "retry", "HTTP 500": "retry"}.get(error, "dead letter")]


@pytest.mark.parametrize(("body", "expected"), table(__file__, "an_answer_to_a_bulk_request"))
def test_an_answer_to_a_bulk_request(body: str, expected: list[str]) -> None:
    """An entry without one clear status is tried again."""
    found, request = replies("results", 200, body, RECORDS)
    assert [reply.error for reply in found] == expected
    assert [(entry["entryId"], entry["event"]["data"]) for entry in request["entries"]] == [
        ("t-0-0", {"n": 0}),
        ("t-0-1", {"n": 1}),
    ]


def test_the_policy_may_say_otherwise() -> None:
    """A 404 of several records blames none of them; own lines of `retry` count."""
    found, _ = replies("results", 404, "", RECORDS)
    assert [*judge(RECORDS, found, RetryConfig())] == ["split"]
    dropped, _ = replies("single", 200, '{"status":"DROP"}', RECORDS[:1])
    assert [*judge(RECORDS[:1], dropped, RetryConfig(errors={"DROP": "skip"}))] == ["skipped"]
    missing, _ = replies("single", 404, "", RECORDS[:1], statuses={"404": "retry"})
    assert [*judge(RECORDS[:1], missing, RetryConfig(statuses={"404": "retry"}))] == ["retry"]


def request(path: str, kind: str, body: str) -> bytes:
    lines = f"Host: h\r\nContent-Length: {len(body.encode())}\r\n" + (f"Content-Type: {kind}\r\n" if kind else "")
    return f"POST {path} HTTP/1.1\r\n{lines}traceparent: x\r\n\r\n{body}".encode()


@pytest.mark.parametrize(("path", "kind", "body", "status", "says"), table(__file__, "a_refused_request"))
async def test_a_request_is_refused(
    server: RunningServer, path: str, kind: str, body: str, status: int, says: str
) -> None:
    """With what to do instead, and nothing is written, nor of the other entries."""
    response = await server.ask(request(path, kind, body))
    assert (response.status, server.kafka.producer.records) == (status, []), response.json
    assert says in response.json["description"]


@pytest.mark.parametrize(("query", "kind", "body", "key", "holds"), table(__file__, "a_published_event"))
async def test_an_event_is_published(
    server: RunningServer, query: str, kind: str, body: str, key: str | None, holds: dict[str, Any]
) -> None:
    """As an event, unless it is one or shall be raw; further metadata are headers of the record."""
    response = await server.ask(request(f"/v1.0/publish/kafka/t?metadata.tenant=blue{query}", kind, body))
    assert (response.status, response.body) == (204, b"")
    (record,) = server.kafka.producer.records
    value, headers = json.loads(record.value or b""), dict(record.headers or ())
    assert {name: value.get(name) for name in holds} == holds
    assert (record.key, headers["tenant"]) == (key.encode() if key else None, b"blue")
    kind = "application/cloudevents+json" if "traceparent" in value else kind
    assert headers["content-type"] == kind.encode()


async def test_entries_are_published(server: RunningServer) -> None:
    """A string is text, and bytes are in base64; metadata of an entry wins. The response names those that failed."""
    entries = [
        {"entryId": "a", "event": "text", "metadata": {"partitionKey": "mine"}},
        {"entryId": "b", "event": {"n": 1}, "contentType": "application/json"},
        {"entryId": "c", "event": "eA==", "contentType": "application/octet-stream"},
    ]
    path = "/v1.0-alpha1/publish/bulk/kafka/t?metadata.partitionKey=all&metadata.rawPayload=true"
    asked = request(path, "application/json", json.dumps(entries))
    assert (await server.ask(asked)).status == 204
    found = [(record.key, record.value) for record in server.kafka.producer.records]
    assert found == [(b"mine", b"text"), (b"all", b'{"n": 1}'), (b"all", b"x")]
    server.kafka.producer.refuse(None, KafkaUnavailable("away"))
    failed = await server.ask(asked)
    assert (failed.status, [one["entryId"] for one in failed.json["failedEntries"]]) == (500, ["b"])
    server.kafka.producer.refuse(KafkaUnavailable("away"))
    assert (await server.ask(request("/v1.0/publish/kafka/t", "", "x"))).status == 503


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.method} {row.path}")
async def test_a_foreign_path_names_what_exists(server: RunningServer, row: Any) -> None:
    """A page, a heading in it and one of our operations; none is below /adm."""
    page, _, anchor = row.page.partition("#")
    headings = re.findall(r"^#+ (.*)", (DOCS / page).read_text(), re.MULTILINE)
    assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
    operations = {re.sub(r"{\w+}", "{}", one) for one in json.loads(CONTRACT.read_text())["operations"]}
    assert not row.instead or re.sub(r"{\w+}", "{}", row.instead) in operations
    path = row.path.removesuffix("/**").replace("{", "my-").replace("}", "")
    said = own_of(row.method or "GET", path)
    assert f"{row.product}: {row.instead and 'use '}" in said
    assert row.page in said
    assert "{" not in said or "{" not in row.path
    for method in ("GET", "POST", "PUT"):
        assert "/adm/" not in (await server.get(f"{path}/x", method)).body.decode()
