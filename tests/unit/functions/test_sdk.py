"""What handlers meet."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import pytest

from headrace.functions.sdk import (
    Context,
    Event,
    EventSource,
    Logger,
    Platform,
    QualifiedOffset,
    Response,
    TriggerInfo,
    has_no_ack,
)
from headrace.functions.worker import serving


def test_each_attribute_of_an_event_may_be_set() -> None:
    """As in Nuclio, whose functions make a call of the event that they got."""
    for event in (Event(b"body"), serving._RecordEvent(b"body", None, None, 42, -1, EventSource("flights", 3, 8))):
        changed = {"headers": {"X": "1"}, "path": "/call", "id": "i", "size": 9, "fields": {"q": "1"}, "topic": "other"}
        for name, value in changed.items():
            setattr(event, name, value)
        assert {name: getattr(event, name) for name in changed} == changed
        assert (event.get_header("x"), json.loads(event.to_json())["path"]) == ("1", "/call")


def test_the_logger_binds_formats_and_filters() -> None:
    """`_with`, `bind`, printf arguments, and a least level; a field may have any name."""
    lines: list[Any] = []
    logger = Logger(lambda *line: lines.append(line), level="info").bind(worker_id="0")
    logger.debug("no")
    logger.info("took %d of %s", 3, "x")
    logger.warn_with("slow", seconds=2)
    logger.error("all %d done", "x")
    Logger(lambda *line: lines.append(line)).info_with("late", level="high", message="m", self=1)
    assert lines == [
        ("info", "took 3 of x", {"worker_id": "0"}),
        ("warning", "slow", {"worker_id": "0", "seconds": 2}),
        ("error", "all %d done ('x',)", {"worker_id": "0"}),
        ("info", "late", {"level": "high", "message": "m", "self": 1}),
    ]


def test_a_context_without_a_worker_shows_what_a_handler_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Handlers' own tests see log lines on standard error, and what is emitted."""
    context = Context()
    context.logger.info_with("hello", a=1)
    assert capsys.readouterr().err == "info hello a=1\n"
    context.emit("t", b"k", {"a": 1})
    assert context.emitted == [("t", b"k", {"a": 1}, None)]


def test_nuclios_own_constructor_arguments_make_an_event() -> None:
    """Handlers make events for `call_function`, with the names of Nuclio's SDK."""
    event = Event(body={"a": 1}, path="/x", method="PUT", content_type="text/plain", topic="t", shard_id=2, offset=7)
    assert (event.path, event.method, event.content_type, event.id) == ("/x", "PUT", "text/plain", "t-2-7")
    with pytest.raises(TypeError, match="an event has no colour: known here are topic, shard_id"):
        Event(colour="red")


def test_an_event_becomes_json_as_in_nuclio() -> None:
    """Bytes as base64, the timestamp as text, the trigger as a mapping."""
    origin = EventSource("flights", 3, 8, TriggerInfo("kafka-cluster", "k"))
    found = json.loads(Event(b"\xff", b"key", {"h": b"1"}, 42, 1_700_000_000_123, origin).to_json())
    assert (found["body"], found["timestamp"], found["size"]) == ("/w==", "2023-11-14 22:13:20", 1)
    assert found["trigger"] == {"kind": "kafka-cluster", "name": "k"}
    assert (found["id"], found["topic"], found["shard_id"], found["offset"]) == ("flights-3-42", "flights", 3, 42)


def test_a_response_without_acknowledgement_is_known_in_any_letter_case() -> None:
    """Nuclio looks for one spelling, and its own SDK writes another."""
    response = Response()
    assert not has_no_ack(response.headers)
    response.ensure_no_ack()
    assert response.headers == {"x-nuclio-stream-no-ack": True}
    for name in ("x-nuclio-stream-no-ack", "X-Nuclio-Stream-No-Ack", "X-NUCLIO-STREAM-NO-ACK"):
        assert has_no_ack({name: True}) and has_no_ack({name: "true"}) and not has_no_ack({name: False})


def test_a_qualified_offset_is_comparable_and_can_be_stored() -> None:
    """As a tuple it can be put into JSON, a set or a database."""
    event = Event(origin=EventSource("t", 3, 8), offset=5)
    offset = QualifiedOffset.from_event(event)
    assert (offset.topic, offset.partition, offset.offset) == ("t", 3, 5)
    assert QualifiedOffset(*json.loads(json.dumps(offset))) == offset < QualifiedOffset("t", 3, 6)


def test_another_function_is_called_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nuclio's target header and content types; a function that is not there is named with what to set."""

    class Target(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = [self.path, self.headers["X-Nuclio-Target"], self.headers["Content-Type"], body.decode()]
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NUCLIO_FUNCTION_URL", f"http://127.0.0.1:{server.server_port}")
    platform = Platform()
    response = platform.call_function(
        "enrich", Event({"a": 1}, path="do", headers={"h": b"1", "none": None}), timeout=60
    )
    assert (response.status_code, response.body) == (201, ["/do", "enrich", "application/json", '{"a": 1}'])
    assert platform.call_function("enrich", Event(b"x")).body == ["/", "enrich", "text/plain", "x"]
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError, match=r"failed to reach function enrich at .*set NUCLIO_FUNCTION_URL"):
        platform.call_function("enrich", Event(b"x"), timeout=5)
