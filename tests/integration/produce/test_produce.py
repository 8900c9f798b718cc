"""Producing over HTTP to a real broker, with a real schema registry."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, TopicPartition

pytestmark = pytest.mark.secured


def post(url: str, topic: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/producers/{topic}", data, {"Content-Type": "application/json", **headers}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as response:
        with response:
            return response.code, json.load(response)


def read(kafka: Any, topic: str, partition: int, count: int) -> list[Message]:
    """Read a partition from its start, with a client of the test's own."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "test-reader"})
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        found: list[Message] = []
        limit = time.monotonic() + 120
        while len(found) < count:
            assert time.monotonic() < limit, f"{len(found)} of {count} records in {topic}-{partition}"
            found += consumer.consume(count - len(found), timeout=0.5)
        return found
    finally:
        consumer.close()


@pytest.fixture
def url(kafka: Any, schema_registry: Any, module_headrace: Callable[..., Any]) -> str:
    return module_headrace(
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "schema_registry": {"url": schema_registry.url, "timeout_seconds": 60},
        }
    ).url


def test_records_are_where_the_response_says(kafka: Any, topic: Callable[..., str], url: str) -> None:
    """Partition and offset, key, value, timestamp and headers, byte for byte."""
    name = topic(3)
    records = [
        {"key": "a", "value": {"n": 1}, "partition": 2, "timestamp": 1_700_000_000_000, "headers": {"h": "\u00e9"}},
        {"key": "b", "value": None, "partition": 2},
        {"value": [1, 2], "partition": 2, "correlationId": "mine"},
    ]
    status, body = post(url, name, {"records": records}, **{"X-Correlation-Id": "http"})
    assert status == 200
    assert body["offsets"] == [{"partition": 2, "offset": offset} for offset in range(3)]
    first, second, third = read(kafka, name, 2, 3)
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"a", b'{"n": 1}', 1_700_000_000_000)
    assert first.headers() == [("X-Correlation-Id", b"http"), ("h", "\u00e9".encode())]
    assert (second.key(), second.value()) == (b"b", None)
    assert (third.key(), third.value()) == (None, b"[1, 2]")
    assert third.headers() == [("X-Correlation-Id", b"mine")]


def test_records_are_refused_alone_not_with_their_batch(topic: Callable[..., str], url: str) -> None:
    """A topic's limit holds for batches, so batches are made as small as the topic wants them."""
    name = topic(1, max_message_bytes=100_000)
    status, body = post(url, name, {"records": [{"value": "x" * 50_000}] * 3})
    assert (status, body["offsets"]) == (200, [{"partition": 0, "offset": offset} for offset in range(3)])
    status, body = post(url, name, {"records": [{"value": 1}, {"value": "x" * 120_000}, {"value": 2}]})
    assert (status, [entry.get("offset") for entry in body["offsets"]]) == (200, [3, None, 4])
    assert body["offsets"][1]["outcome"] == "fail"


def test_equal_keys_go_to_the_partition_of_the_java_client(topic: Callable[..., str], url: str) -> None:
    """murmur2 of the stored bytes, so both clients agree where a key lives."""
    name = topic(10)
    keys = ["", "a", "kafka", "foobar", "\u00e9t\u00e9", "x" * 99]
    records = [{"key": key, "value": 1} for key in keys]
    _, body = post(url, name, {"keyFormat": "STRING", "records": records})
    assert [entry["partition"] for entry in body["offsets"]] == [_murmur2(key.encode()) % 10 for key in keys]


def _murmur2(data: bytes) -> int:
    """Kafka's murmur2, from its description: seed 0x9747b28c, made positive."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    for at in range(0, len(data) // 4 * 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if rest := data[len(data) // 4 * 4 :]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def test_without_kafka_and_registry_headrace_lives_and_says_what_it_waits_for(headrace: Callable[..., Any]) -> None:
    """Live, not ready, 503 with Retry-After in a moment."""
    process = headrace(
        {
            "kafka": {"bootstrap_servers": "127.0.0.1:1", "request_timeout_seconds": 1},
            "schema_registry": {"url": "http://127.0.0.1:1"},
        },
        wait=False,
    )
    limit = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"{process.url}/health/liveness", timeout=60) as response:
                assert response.status == 200
            break
        except urllib.error.URLError:
            assert time.monotonic() < limit
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"{process.url}/health/readiness", timeout=60)
    with raised.value as response:
        assert response.code == 503
        assert not json.load(response)["ready"]
    status, body = post(process.url, "t", {"records": [{"value": 1}]})
    assert (status, body["code"]) == (503, "ERR40012")
    assert process.terminate() == 0


def test_a_record_that_is_refused_leaves_no_doubt_of_others(topic: Callable[..., str], url: str) -> None:
    """What went to Kafka with it is there, in other requests and in its own."""
    name = topic(**{"cleanup.policy": "compact"})
    good, bad = b'{"records":[{"key":"k","value":1}]}', b'{"records":[{"value":1}]}'
    host, port = url.removeprefix("http://").split(":")
    responses: dict[bytes, set[int]] = {good: set(), bad: set()}
    with contextlib.ExitStack() as stack:
        sent = []
        for body in [*[good] * 9, bad] * 10:
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(host, int(port), 120)))
            connection.request("POST", f"/producers/{name}", body, {"Content-Type": "application/json"})
            sent.append((body, connection))
        for body, connection in sent:
            response = connection.getresponse()
            responses[body].add(response.status)
            entry = json.load(response)["offsets"][0]
            assert entry.get("outcome", "ok") in ("ok", "fail")
    assert responses[bad] == {400}
    assert responses[good] == {200}
    status, body = post(url, name, {"records": [{"key": "k", "value": 1}, {"value": 1}, {"key": "k", "value": 2}]})
    assert (status, [entry.get("errorCode") for entry in body["offsets"]]) == (200, [None, 50002, None])
