"""What clients that fetch records may report of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.audit_config import AuditConfig
from headrace.config.http import HttpConfig
from headrace.errors import AuditNotTaken, HeadraceError, ProducerQueueFull, TooManyRecords
from headrace.http.endpoint import served
from headrace.runtime import Deadline
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.audit_events import Line
from headrace.runtime.telemetry.metrics import Metrics
from headrace_devkit.testing import ManualClock
from headrace_dialects.light4j.audit_routes import AuditEndpoints
from yaml_table import table

RECORD = {"topic": "orders", "partition": 1, "offset": 7}
SETTINGS = HttpConfig()


class Target:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    async def write(self, lines: Sequence[Line]) -> tuple[int, str]:
        self.events += [json.loads(line) for _, line in lines]
        return 0, ""


def report(body: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """Return the response to a body, and the audit events."""
    if not isinstance(body, str | bytes):
        body = json.dumps(body)
    text = body.encode() if isinstance(body, str) else body
    sent: list[Any] = []

    async def receive() -> bytes:
        return text

    async def send(response: Any) -> None:
        sent.append(response.body)

    headers = {b"content-type": b"application/json"}
    head = SimpleNamespace(headers=headers, query=b"", method="POST", route=SimpleNamespace(parameters={}))
    caller = SimpleNamespace(principal=None)
    body, response = SimpleNamespace(has_more=False, receive=receive), SimpleNamespace(send=send)
    request: Any = SimpleNamespace(head=head, caller=caller, body=body, response=response)

    async def main() -> tuple[Any, list[Any]]:
        target, clock = Target(), ManualClock(1000.0)
        audit = Audit(AuditConfig(**settings), target, Metrics(), clock)
        await audit.start()
        audit.put((), 0, 1)  # so that it is not empty, and its budget counts
        family = AuditEndpoints(None if settings.get("to") == "none" else audit, 3)
        [(_, serve, _)] = served(family, SETTINGS, audit)
        await serve(request)
        await audit.drain(Deadline(clock, 1))
        await audit.stop()
        return json.loads(sent[0]), target.events

    return asyncio.run(main())


@pytest.mark.parametrize("settings", [{}, {"to": "file", "records": "none"}])
@pytest.mark.parametrize("name", ["record", "consumerRecord"])
def test_each_result_has_an_event_and_all_are_returned(settings: Any, name: str) -> None:
    """With every setting, under either name of the record, and with unknown fields."""
    results = [
        {name: {**RECORD, "value": {"card": "4111"}, "more": 1}, "processed": True, "key": "k", "timestamp": 5},
        {name: RECORD, "processed": False, "stacktrace": "Traceback", "correlationId": "c-1", "more": [1]},
    ]
    assert report([], **settings) == ([], [])
    response, events = report(results, **settings)
    assert events == response
    assert [len(event.pop("id")) for event in events] == [22, 22]
    generated = events[0].pop("correlationId")
    assert len(generated) == 22
    usual = {"serviceId": "headrace", "auditType": "ACTIVE_CONSUMER", **RECORD}
    hashed = "8254c329a92850f6d539dd376f4816ee"
    assert events == [
        {**usual, "auditStatus": "SUCCESS", "timestamp": 5, "key": hashed},
        {**usual, "auditStatus": "FAILURE", "timestamp": 1_000_000, "correlationId": "c-1"},
    ]


LONG_KEY = json.dumps([{"record": RECORD, "key": "k" * 10_001}])
LONG_ID = json.dumps([{"record": RECORD, "correlationId": "c" * 1001}])


@pytest.mark.parametrize(
    ("body", "index", "text"),
    [
        *table(__file__, "a_wrong_report"),
        (b"\xff", None, "not an array"),
        (LONG_KEY, 0, "length <= 10000"),
        (LONG_ID, 0, "length <= 1000"),
        ('[{"record":' + "[" * 100_000, None, ""),
    ],
)
def test_a_report_that_is_not_as_it_should_be_is_refused(body: Any, index: int | None, text: str) -> None:
    """400 with light-4j's code and the index; nothing is audited."""
    with pytest.raises(AuditNotTaken) as refused:
        report(body)
    assert (refused.value.code, refused.value.status) == ("ERR30004", 400)
    assert text in refused.value.description
    assert index is None or refused.value.parameters["index"] == index


@pytest.mark.parametrize(
    ("results", "settings", "error"),
    [(4, {}, TooManyRecords), (3, {}, ProducerQueueFull), (1, {"to": "none"}, AuditNotTaken)],
)
def test_a_report_that_does_not_fit_is_refused(
    results: int, settings: Any, error: type[HeadraceError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many, no room for the events, or nowhere to write them."""
    monkeypatch.setattr(AuditConfig, "max_pending_bytes", 2000)
    with pytest.raises(error):
        report([{"record": RECORD}] * results, **settings)
