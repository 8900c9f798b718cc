"""What handlers meet."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from headrace.functions.sdk import Context, Event, EventSource, Logger, Response, TriggerInfo


def test_an_event_has_the_fields_of_a_kafka_record() -> None:
    """Nuclio's fields, and ours: key, timestamp_ms, a true id."""
    origin = EventSource("flights", 3, 8, TriggerInfo("kafka-cluster", "k"))
    event = Event(b"body", b"key", [("A", b"1"), ("b", None), ("A", b"2")], 42, 1_700_000_000_123, origin)
    assert (event.body, event.key, event.offset, event.size) == (b"body", b"key", 42, 4)
    assert (event.topic, event.path, event.shard_id, event.num_shards) == ("flights", "flights", 3, 8)
    assert (event.id, event.timestamp_ms) == ("flights-3-42", 1_700_000_000_123)
    assert event.timestamp == datetime(2023, 11, 14, 22, 13, 20)
    assert event.headers == {"A": b"2", "b": None}
    assert (event.get_header("a"), event.get_header("none")) == (b"2", None)
    assert (event.trigger.kind, event.trigger.name) == ("kafka-cluster", "k")
    assert (event.content_type, event.method, event.fields, event.last_in_batch) == ("", "", {}, False)


def test_a_bare_event_is_a_tombstone_without_headers() -> None:
    """Null value: body None, size 0."""
    event = Event()
    assert (event.body, event.size, event.headers, event.timestamp, event.path) == (None, 0, {}, None, "/")


def test_headers_are_the_handlers_own_to_change() -> None:
    """The same dict comes back each time."""
    event = Event(headers=[("a", b"1")])
    event.headers["b"] = b"2"
    assert event.headers == {"a": b"1", "b": b"2"}


def test_the_logger_binds_formats_and_filters() -> None:
    """`_with`, `bind`, printf arguments, and a least level."""
    lines: list[Any] = []
    logger = Logger(lambda *line: lines.append(line), level="info").bind(worker_id="0")
    logger.debug("no")
    logger.info("took %d of %s", 3, "x")
    logger.warn_with("slow", seconds=2)
    logger.error("all %d done", "x")
    assert lines == [
        ("info", "took 3 of x", {"worker_id": "0"}),
        ("warning", "slow", {"worker_id": "0", "seconds": 2}),
        ("error", "all %d done ('x',)", {"worker_id": "0"}),
    ]


def test_without_a_worker_the_logger_writes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Handlers' own tests see their log lines."""
    Context().logger.info_with("hello", a=1)
    assert capsys.readouterr().err == "info hello a=1\n"


def test_a_context_has_a_bag_and_the_response_class() -> None:
    """`context.user_data.x = ...` and `context.Response(...)` as in Nuclio."""
    context = Context(worker_id="2", trigger=TriggerInfo("kafka", "k"))
    context.user_data.names = ["a"]
    assert context.user_data.names == ["a"]
    assert (context.worker_id, context.trigger.kind, context.trigger_name) == ("2", "kafka", "k")
    response = context.Response(body={"a": 1}, status_code=201)
    assert isinstance(response, Response)
    assert (response.headers, response.content_type) == ({}, "text/plain")


def test_a_field_may_have_any_name() -> None:
    """What a handler calls its fields does not meet the logger's own names."""
    lines: list[Any] = []
    Logger(lambda *line: lines.append(line)).info_with("late", level="high", message="m", self=1)
    assert lines == [("info", "late", {"level": "high", "message": "m", "self": 1})]
