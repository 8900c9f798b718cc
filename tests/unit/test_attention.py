"""What needs a person, from the responses of the HTTP API, and the page of `headrace status`."""

from __future__ import annotations

from typing import Any

import pytest
from click import unstyle

from headrace.cli.status import Poll, document, page, rates
from headrace.client.attention import needs_of
from yaml_table import table


def consumer(name: str = "a", why: str = "", state: str = "closed", **changed: Any) -> dict[str, Any]:
    breaker = {"state": state, "until": None, "why": why}
    usual = {"kind": "reactive", "group": "g", "paused": None, "kafka": None, "lag": 0, "inFlight": 0, "attempts": 0}
    return {**usual, "name": name, "breaker": breaker, "why": why, "counts": {}, "oldestSeconds": None, **changed}


def services(**reasons: str) -> dict[str, Any]:
    found = {name.replace("_", " "): {"ready": not why, "reason": why} for name, why in reasons.items()}
    return {"services": {**found, "audit": {"ready": True, "reason": "3 events are missing in the audit"}}}


PAUSED = {"by": "ada", "since": "2026-01-01T00:00:00Z", "reason": "deploy"}
PARTS = {
    "readiness": services(kafka="no broker", reactive_a_delivery="x", web="port", table_t="full: y", pipeline_p="z"),
    "consumers": {
        "consumers": [
            consumer("paused", "paused by ada", paused=PAUSED),
            consumer("a", "HTTP 503", "open"),
            consumer("f.t", "a retry is due", kind="function"),
            consumer("fine"),
            consumer("away", "no broker", kafka={"since": "", "why": "no broker"}),
        ]
    },
    "pipelines": {"pipelines": [{"name": "p", "state": "failed", "reason": "z", "flows": {}, "restarts": 3}]},
    "tables": {"tables": [{"name": "t", "state": "full", "reason": "y", "rows": 1, "lag": 0}]},
    "dead_letters": {
        "topics": [{"topic": "o.dlq", "left": 2, "oldest": "t1", "newest": "t2"}, {"topic": "q.dlq", "left": 0}]
    },
}


def test_the_worst_is_first_and_nothing_is_named_twice() -> None:
    """Each has the reason and a command; what a consumer, pipeline or table says is not repeated by its service."""
    assert [(need.severity, need.about, need.why, need.command) for need in needs_of(PARTS)] == [
        tuple(row) for row in table(__file__, "needs")
    ]
    assert needs_of({}) == []


@pytest.mark.parametrize(("counts", "rate"), [(150, 25.0), (99, None)], ids=["known", "started again"])
def test_rates_are_of_records_completed_between_two_pages(counts: int, rate: float | None) -> None:
    """Delivered records and dead letters count; without an earlier count there is no rate."""
    before, now = (
        Poll(
            seconds,
            {"consumers": {"consumers": [consumer(counts={"delivered": n, "deadLetters": 0, "taken": 7 * n})]}},
            {},
        )
        for seconds, n in ((10.0, 100), (12.0, counts))
    )
    assert rates(before, now) == {"a": rate}
    assert rates(None, now) == {"a": None}


def test_text_from_outside_reaches_no_terminal() -> None:
    """Control characters are escaped, and a name is one word of the command."""
    name = "a\x1b[2J; rm -rf ~ '"
    shown = unstyle(
        page("http://h:1", Poll(0.0, {"consumers": {"consumers": [consumer(name, "\x1b[31m" * 9)]}}, {}), None)
    )
    assert "\x1b" not in shown
    assert r"""headrace reactive status 'a\x1b[2J; rm -rf ~ '"'"''""" in shown
    assert document("u", Poll(0.0, {}, {}, "unreachable"), None)["needs"][0]["severity"] == "outage"
