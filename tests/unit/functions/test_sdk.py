"""What handlers meet."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.functions import sdk
from headrace.functions.sdk import Context, Event, EventSource, Logger, Platform, QualifiedOffset, Response, TriggerInfo
from headrace.functions.worker import serving


def test_the_logger_binds_formats_and_filters() -> None:
    """`_with`, `bind` in place, printf arguments, a least level, stacks; a field may have any name."""
    lines: list[Any] = []
    logger = Logger("info", sink=lambda *line: lines.append(line))
    logger.bind(worker_id="0")
    logger.debug("no")
    logger.info("took %d of %s", 3, "x")
    logger.warn_with("slow", seconds=2, worker_id="1")
    logger.error("all %d done", "x")
    Logger(logging.ERROR, "theirs", lambda *line: lines.append(line)).warn("no")
    Logger(sink=lambda *line: lines.append(line)).info_with("late", level="high", message="m", self=1)
    assert lines == [
        ("info", "took 3 of x", {"worker_id": "0"}),
        ("warning", "slow", {"worker_id": "0", "seconds": 2}),
        ("error", "all %d done ('x',)", {"worker_id": "0"}),
        ("info", "late", {"level": "high", "message": "m", "self": 1}),
    ]
    try:
        raise ValueError("no seat")
    except ValueError:
        logger.exception("failed")
    assert lines[-1][0] == "error" and "ValueError: no seat" in lines[-1][2]["exception"]


PUBLIC = {
    Event(b"v"): """body content_type trigger fields headers id method path size timestamp url shard_id num_shards type
        type_version version last_in_batch offset topic to_json get_header from_msgpack from_json deserialize
        compile_explicit_ack_message""",
    Response(): """headers body status_code content_type event_id ensure_no_ack from_entrypoint_output
        from_entrypoint_output_async get_handler_output_type from_generator_output empty_response""",
    Context(): "platform logger user_data Response worker_id trigger trigger_name logger_per_async_task",
    Logger(): "set_handler debug info warn error debug_with info_with warn_with error_with bind",
    Platform("kube"): """kind namespace explicit_ack set_drain_callback set_termination_callback call_function
        on_control_callback""",
    QualifiedOffset("t", 3, 5): "topic partition offset from_event compile_explicit_ack_message",
    TriggerInfo(): "kind name",
    sdk.ExceptionWithResponse(503, "b"): "status_code body content_type",
    sdk: """Logger Context Event TriggerInfo EventDeserializerKinds Platform Response ExceptionWithResponse
        QualifiedOffset GENERATOR_RESPONSE SINGLE_RESPONSE RESPONSE_WITH_GENERATOR_BODY""",
}
"""The public members of nuclio-sdk 0.6.3."""


def test_each_public_member_of_nuclios_sdk_is_there_or_named_as_absent() -> None:
    """Code written for Nuclio finds it, or the page says no."""
    page = (Path(__file__).parents[3] / "docs" / "function-reference.md").read_text()
    absent = page[page.index("These are of Nuclio's own runtime") :].partition("\n\n")[0]
    for of, names in PUBLIC.items():
        assert [name for name in names.split() if hasattr(of, name) is (f"`{name}`" in absent)] == []


@pytest.mark.parametrize("body", [b"\xff", "text", {"a": 1}, None, 5, datetime(2022, 1, 1), {b"a": object()}])
def test_an_event_is_printed(body: Any) -> None:
    """`repr` is the JSON of `to_json`, also of headers and texts of bytes, and never fails."""
    event = Event(body, b"k", [("a", b"\xff")], 42, 2**62, EventSource("flights", 3, 8))
    event.__class__ = serving._BytesEvent
    if isinstance(body, dict) and b"a" in body:
        assert repr(event).startswith("<")
        return
    read = json.loads(repr(event))
    assert read["body"] == ("/w==" if isinstance(body, bytes) else str(body) if isinstance(body, datetime) else body)
    assert [read[name] for name in ("topic", "shard_id", "offset", "timestamp")] == ["flights", 3, 42, None]
    assert (read["headers"], read["trigger"]["kind"]) == ({"a": r"\xff"}, "kafka-cluster")
    known = "headers={}, body=b'b', status_code=200, content_type='text/plain', event_id=None"
    assert repr(Response(body=b"b")) == f"Response({known})"


def test_nuclios_own_constructor_arguments_make_an_event() -> None:
    """Handlers make events for `call_function`, with the names of Nuclio's SDK."""
    event = Event(body={"a": 1}, path="/x", method="PUT", content_type="text/plain", topic="t", shard_id=2, offset=7)
    assert (event.path, event.method, event.content_type, event.id) == ("/x", "PUT", "text/plain", "t-2-7")
    with pytest.raises(TypeError, match="an event has no colour: known here are topic, shard_id"):
        Event(colour="red")


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
