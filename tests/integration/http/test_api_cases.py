"""Requests made of the API document: whatever is sent, what comes back is what the document says, and never a 500."""

from __future__ import annotations

import collections
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks
from schemathesis.specs.openapi.schemas import OpenApiSchema

from headrace.app.documents import every_endpoint
from headrace.http.endpoint import JSON, NDJSON, Endpoint
from headrace.http.endpoint import OPEN as OPEN_RULE
from headrace_devkit.testing import Cluster, HeadraceProcess, Registry

TOKEN, SCOPES = "a-token-that-may-do-all", ["kafka:r", "kafka:w", "admin", "metrics", "consumers:w"]
OPEN = tuple(
    one.path.partition("{")[0]
    for one in every_endpoint()
    if one.described and one.rule == OPEN_RULE and one.path != "/"
)
UNREADABLE = (400, 403, 404, 414, 431)
"""Statuses of heads that are refused before their caller is asked for."""
POST = "/producers/{topic}"
WRITING = [POST, "/transactions"]
STEERING = (
    "/adm/",
    "/consumers/",
    "/topics",
    "/groups/",
    "/reactive-consumers",
    "/health/{serviceId}",
    "/query",
    "/close-query",
    "/tables/",
    "/schemas/",
    "/v1.0",
)
"""Where what is asked for by chance is not there, so that it is only seldom answered with a success."""
NOT_SENT = ("createTopic", "shutDown", "getOpenApi", "getSpecification")
"""What would make topics of thousands of partitions by chance, what ends the process, and the document itself."""
WHOLE = ("partition", "timestamp")  # where JSON Schema takes 1.0 as well
PLAIN = ["string", "json", "binary"]
SCHEMA = {"type": "record", "name": "Thing", "fields": [{"name": "n", "type": "long"}]}
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@schemathesis.serializer(NDJSON)
def lines(context: Any, value: Any) -> bytes:
    """Send text as it is: lines, most of which are no records."""
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


@pytest.fixture(scope="module")
def topics(kafka: Cluster) -> list[str]:
    """Topics that are there, and one that is not."""
    unique = uuid.uuid4().hex[:8]
    names = [f"cases-{unique}-{n}" for n in range(2)]
    for name in names:
        kafka.create_topic(name, 3, {})
    return [*names, f"cases-{unique}-none"]


@pytest.fixture(scope="module")
def api(
    kafka: Cluster, schema_registry: Registry, topics: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenApiSchema]:
    """A running Headrace, and its document as it serves it."""
    config = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
        "schema_registry": {"url": schema_registry.url},
        "registrations": {"backends": ["https://backend.example:8443/"]},
        "tables": {"cases": {"topic": topics[0]}},
        "security": {"mode": "token", "max_in_flight": 1000, "principals": {"all": {"token": TOKEN, "scopes": SCOPES}}},
    }
    process = HeadraceProcess(config, tmp_path_factory.mktemp("cases"))
    process.start()
    process.wait_ready()
    yield schemathesis.openapi.from_url(f"{process.url}/openapi.json")
    process.kill()


@st.composite
def writing_cases(draw: st.DrawFn, operation: Any, topics: list[str]) -> Any:
    """Draw a request by the document alone, or one that is also meant: a topic that is there, values that fit."""
    if draw(st.integers(0, 9)) == 5:  # the ends of a range are drawn more often than its middle
        return draw(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    case = draw(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    if one_topic := "topic" in case.path_parameters:
        case.path_parameters["topic"] = draw(st.sampled_from(topics))
    # Text as JSON is of the kind of any other body.
    if case.media_type == JSON and isinstance(case.body, dict) and draw(st.integers(0, 9)) != 5:
        case.headers.pop("Idempotency-Key", None)  # which the library draws again for other bodies
        for part in [case.body] if one_topic else case.body["topics"]:
            draw(st.sampled_from([plain, with_schema]))(part)
            for record in part["records"]:
                record |= {name: int(n) for name, n in record.items() if isinstance(n, float) and name in WHOLE}
                if record.get("partition") is not None:
                    record["partition"] %= 3
            if not one_topic:
                part["topic"] = draw(st.sampled_from(topics[:-1]))
    return case


def without_schema(body: dict[str, Any]) -> None:
    for name in [name for name in body if "Schema" in name or "Format" in name]:
        del body[name]


def plain(body: dict[str, Any]) -> None:
    """Keep records, and formats without a schema."""
    wanted = {name: str(body.get(name)).lower() for name in ("keyFormat", "valueFormat")}
    without_schema(body)
    for name, format_name in wanted.items():
        part, body[name] = name.removesuffix("Format"), format_name if format_name in PLAIN else "string"
        for record in body["records"]:
            if record.get(part) is not None and body[name] != "json":
                fits = str(record[part]).encode(errors="replace").decode()
                record[part] = "AAH/" if body[name] == "binary" else fits


def with_schema(body: dict[str, Any]) -> None:
    """Keep records, as Avro."""
    without_schema(body)
    body |= {"valueFormat": "avro", "valueSchema": json.dumps(SCHEMA)}
    for record in body["records"]:
        record.pop("key", None)
        record["value"] = {"n": record.get("timestamp") or 0} if record.get("value") else None


def send_all(cases: st.SearchStrategy[Any], count: int) -> collections.Counter[int]:
    """Send cases, each with a token and without, check every response, and return how many had which status."""
    statuses: collections.Counter[int] = collections.Counter()
    again = count < 1000  # the short run sends the same cases every time

    @settings(max_examples=count, deadline=None, database=None, derandomize=again, suppress_health_check=[*HealthCheck])
    @given(cases)
    def send(case: Any) -> None:
        response = case.call(timeout=120, headers={"Authorization": f"Bearer {TOKEN}"})
        statuses[response.status_code] += 1
        assert response.status_code not in (401, 500)
        case.validate_response(response, checks=CHECKS)
        if again:
            stranger = case.call(timeout=120)
            assert case.path == "/" or case.path.startswith(OPEN) or stranger.status_code in (401, *UNREADABLE)
            case.validate_response(stranger, checks=CHECKS)

    send()
    return statuses


def check_writing(api: OpenApiSchema, topics: list[str], path: str, count: int) -> None:
    statuses = send_all(writing_cases(api[path]["POST"], topics), count)
    assert sum(statuses.values()) >= count
    assert sum(n for status, n in statuses.items() if status < 300) >= 0.2 * count, statuses
    assert sum(n for status, n in statuses.items() if status >= 400) >= 0.1 * count, statuses


@pytest.mark.parametrize("path", WRITING)
def test_writing_is_as_documented(api: OpenApiSchema, topics: list[str], path: str) -> None:
    """60 requests to produce, half as many to its relative, of which a fifth at least is served."""
    check_writing(api, topics, path, 60 if path == POST else 30)


@pytest.mark.parametrize(
    "endpoint",
    [one for one in every_endpoint() if one.described and one.path not in WRITING and one.id not in NOT_SENT],
    ids=lambda one: one.id,
)
def test_the_other_endpoints_are_as_documented(api: OpenApiSchema, endpoint: Endpoint) -> None:
    """With and without what they ask for."""
    path, operation = endpoint.path, api[endpoint.path][endpoint.method]
    modes = [GenerationMode.POSITIVE]
    if endpoint.query:
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        statuses = send_all(operation.as_strategy(generation_mode=mode), 5)
        assert path.startswith(STEERING) or (200 in statuses) is (mode is GenerationMode.POSITIVE), statuses
