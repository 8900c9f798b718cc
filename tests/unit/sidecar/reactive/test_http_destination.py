"""A backend as a destination: what each response means for the records, and which of them are sent at all."""

from __future__ import annotations

import asyncio
import json
import math
from email.utils import formatdate
from typing import Any, get_args
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.backend import BackendConfig, BackendMode
from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import Delivery, Reply
from headrace.errors import DestinationUnavailable, RegistryUnavailable
from headrace.formats.choice import Codecs
from headrace.records import Record, TopicPartition
from headrace.sidecar.reactive.backend_connection import BackendResponse
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.reactive.http_destination import MAX_WAIT_SECONDS, HttpDestination, retry_after_seconds
from headrace_devkit.testing import ManualClock

CODECS = Codecs(None)  # type: ignore[arg-type]
ONE = b'[{"processed":true}]'
DONE = b'[{"processed":true},{"processed":true}]'


class FakeClient:
    """Answers every post in the same way."""

    url = "http://localhost/"

    def __init__(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.response = BackendResponse(status, headers, body)
        self.posts: list[tuple[bytes, dict[str, str]]] = []

    async def post(self, body: bytes, lines: bytes) -> BackendResponse:
        self.posts.append((body, dict(line.split(": ", 1) for line in lines.decode().splitlines())))
        return self.response


def destination(client: FakeClient, mode: Any = "results", **retry: Any) -> HttpDestination:
    backend = BackendConfig(url="http://localhost/", mode=mode)
    stored = PayloadDecoder(CODECS.for_reading("string"), "string", CODECS.for_reading("json"), "json")
    made = HttpDestination("c", backend, RetryConfig(**retry), stored, ManualClock(1_800_000_000))
    made.client = client  # type: ignore[assignment]
    return made


def deliver(to: HttpDestination, what: Delivery) -> list[Reply]:
    return list(asyncio.run(to.deliver(what)))


def delivery(*values: bytes) -> Delivery:
    records = [Record("t", 0, n, 0, None, value) for n, value in enumerate(values)]
    return Delivery("g", TopicPartition("t", 0), 1, records, 1)


TWO = delivery(b"1", b"2")


@pytest.mark.parametrize("mode", get_args(BackendMode))
def test_a_backend_can_tell_a_replay_from_a_first_delivery(mode: str) -> None:
    """By a header of the request, and in batches by a field of each entry; the identity is the same."""
    client = FakeClient(200, ONE)
    once = Delivery("g", TopicPartition("t", 0), 1, [Record("t", 0, 7, 0, None, b"1")], 1)
    deliver(destination(client, mode), once)
    deliver(destination(client, mode), once._replace(replay="job-1"))
    (body, headers), (again, of_replay) = client.posts
    assert headers.get("Idempotency-Key", "g:t:0:7") == "g:t:0:7"
    assert ("X-Headrace-Replay" in headers, of_replay.pop("X-Headrace-Replay")) == (False, "job-1")
    assert {name: of_replay[name] for name in headers} == headers
    inside = {"results": "replay", "status": "replay", "single": ""}.get(mode, "headracereplay")
    if mode == "cloudevents_binary":
        assert of_replay["ce-headracereplay"] == "job-1"
    elif inside:
        found, first = json.loads(again), json.loads(body)
        entry = found if isinstance(found, dict) else found[0]
        assert entry.pop(inside) == "job-1"
        assert found == first


@pytest.mark.parametrize(
    ("path", "status", "alive"), [("", 405, True), ("", 503, False), ("/ready", 204, True), ("/ready", 404, False)]
)
def test_a_backend_is_asked_whether_it_is_up_before_a_record_at_which_it_closed(
    path: str, status: int, alive: bool
) -> None:
    """Only before one that was alone then; by its health, or by OPTIONS."""
    client = AsyncMock(**{"post.side_effect": [DestinationUnavailable("closed", broken_off=True) for _ in range(5)]})
    asked = client.get if path else client.options
    asked.return_value = BackendResponse(status, {}, b"")
    to = destination(client)
    to._health = path
    found = []
    for what in (TWO, delivery(b"1"), delivery(b"1"), TWO):
        with pytest.raises(DestinationUnavailable) as error:
            deliver(to, what)
        found.append(error.value.is_alive)
    assert found == [False, False, alive, False]
    assert error.value.advice == ""
    with pytest.raises(DestinationUnavailable) as error:
        deliver(to, delivery(b"1"))
    assert error.value.advice == 'to skip it: headrace reactive skip c 0 --partition 0 --topic t --reason "..."'
    assert asked.await_count == 2


@pytest.mark.parametrize(
    ("mode", "status", "headers", "wait_seconds"),
    [
        ("results", 302, {}, None),
        ("status", 307, {}, None),
        ("results", 401, {}, None),
        ("status", 503, {}, None),
        ("results", 503, {"retry-after": "7"}, 7),
    ],
)
def test_statuses_that_speak_of_the_backend_blame_no_record(
    mode: str, status: int, headers: dict[str, str], wait_seconds: float | None
) -> None:
    """Among them every redirect, which is not followed; `Retry-After` delays the next delivery."""
    with pytest.raises(DestinationUnavailable, match=f"http://localhost/: it answers HTTP {status}") as raised:
        deliver(destination(FakeClient(status, DONE, **headers), mode), TWO)
    assert raised.value.wait_seconds == wait_seconds


def test_records_that_cannot_be_read_do_not_keep_the_others_back() -> None:
    """They are dead letters at once, and outcomes are in the order of the records."""
    client = FakeClient(200, DONE)
    outcomes = deliver(destination(client), delivery(b"{", b"2", b"\xff", b"4"))
    assert [outcome.permanent for outcome in outcomes] == [True, False] * 2
    assert outcomes[0].error == "DecodeError"
    assert [entry["offset"] for entry in json.loads(client.posts[0][0])] == [1, 3]


@pytest.mark.parametrize("mode", ["results", "single"])
def test_nothing_is_posted_when_nothing_can_be_read(mode: str) -> None:
    """A request without records would mean nothing."""
    client = FakeClient(200, b"[]")
    (outcome,) = deliver(destination(client, mode), delivery(b"{"))
    assert isinstance(outcome, Reply)
    assert outcome.permanent
    assert client.posts == []


def test_a_registry_that_is_down_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without schemas it is not known what is sound."""

    async def load(_: Any, __: Any) -> None:
        raise RegistryUnavailable("it hangs")

    monkeypatch.setattr(PayloadDecoder, "needs_schemas", True)
    monkeypatch.setattr(PayloadDecoder, "load", load)
    with pytest.raises(DestinationUnavailable, match="waiting for the schema registry: it hangs"):
        deliver(destination(FakeClient(200)), TWO)


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (" 120 ", 120.0),
        ("9" * 5000, 300.0),
        (formatdate(NOW + 42), 42.0),  # zone -0000: universal time all the same
        (formatdate(NOW + 315_360_000, usegmt=True), 300.0),
        *((text, None) for text in ("0", "-5", "1.5", "soon", "٣", formatdate(NOW - 1, usegmt=True))),
        ("Mon, 01 Jan 0001 00:00:00 +2359", None),
    ],
)
def test_seconds_and_dates_are_honoured_up_to_the_cap(value: str, seconds: float | None) -> None:
    """Whole seconds and HTTP dates; ten years are five minutes; zero, negative, past and other words say nothing."""
    assert retry_after_seconds(value, NOW) == seconds


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_no_header_breaks_it(value: str) -> None:
    """Whatever a backend writes, the wait is none or sensible."""
    seconds = retry_after_seconds(value, NOW)
    assert seconds is None or (math.isfinite(seconds) and 0 < seconds <= MAX_WAIT_SECONDS)
