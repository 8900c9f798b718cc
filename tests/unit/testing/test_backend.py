from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.errors import EnvironmentProblem
from headrace.testing import PlannedResponse, RecordingBackend

RECORDS = [{"topic": "t", "partition": 0, "offset": offset, "value": offset} for offset in range(3)]


def _post(backend: RecordingBackend, body: Any = RECORDS) -> tuple[int, Any]:
    target = urlsplit(backend.url)
    with contextlib.closing(http.client.HTTPConnection(target.netloc)) as connection:
        connection.request("POST", target.path, json.dumps(body), {"X-Attempt": "2"})
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())


def test_every_record_is_echoed_as_processed(backend: RecordingBackend) -> None:
    """Without a script the backend is a good one, and it remembers the request."""
    status, results = _post(backend)
    assert status == 200
    assert results == [{"record": record, "processed": True} for record in RECORDS]
    assert backend.accepted == backend.records == RECORDS
    (request,) = backend.requests
    assert (request.path, request.headers["x-attempt"]) == ("/kafka/records", "2")


def test_the_script_comes_before_the_response(backend: RecordingBackend) -> None:
    """Scripted answers are used once each, in order; then the standing one."""
    backend.script.extend([PlannedResponse(503), PlannedResponse(fails=lambda record: record["offset"] == 1)])
    backend.response = PlannedResponse(body={"no": "results"})
    assert _post(backend)[0] == 503
    assert [result["processed"] for result in _post(backend)[1]] == [True, False, True]
    assert _post(backend) == (200, {"no": "results"})
    assert [record["offset"] for record in backend.accepted] == [0, 2]
    assert len(backend.records) == 9


def test_the_response_may_depend_on_the_request(backend: RecordingBackend) -> None:
    """A function of the request gives full control."""
    backend.response = lambda request: PlannedResponse(500 if len(request.body) > 1 else 200)
    assert _post(backend)[0] == 500
    assert _post(backend, RECORDS[:1])[0] == 200


def test_a_response_can_be_slow(backend: RecordingBackend) -> None:
    """The delay is at least what was asked for."""
    backend.response = PlannedResponse(delay_seconds=0.05)
    started = time.monotonic()
    _post(backend)
    assert time.monotonic() - started >= 0.05


def test_a_response_can_break_off(backend: RecordingBackend) -> None:
    """Before it has begun or within it; what it would have said was said to nobody."""
    backend.script.extend(
        [PlannedResponse(cut_after_bytes=0), PlannedResponse(cut_after_bytes=5), PlannedResponse(drip_seconds=0.0001)]
    )
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        _post(backend)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        _post(backend)
    assert backend.accepted == []
    assert _post(backend)[0] == 200
    assert backend.accepted == RECORDS


def test_a_response_can_be_anything(backend: RecordingBackend) -> None:
    """Bytes that are no JSON, and headers."""
    backend.response = PlannedResponse(429, body=b"<html>", headers={"Retry-After": "7"})
    target = urlsplit(backend.url)
    connection = http.client.HTTPConnection(target.netloc)
    connection.request("POST", target.path, json.dumps(RECORDS))
    response = connection.getresponse()
    assert (response.status, response.read(), response.headers["Retry-After"]) == (429, b"<html>", "7")
    connection.close()


def test_it_comes_back_at_the_same_address() -> None:
    """Stopped it refuses connections; started again it is where it was."""
    backend = RecordingBackend()
    backend.start()
    url = backend.url
    backend.stop()
    with pytest.raises(ConnectionRefusedError):
        _post(backend)
    backend.start()
    assert backend.url == url
    assert _post(backend)[0] == 200
    backend.stop()


def test_waiting_in_vain_says_what_had_come(backend: RecordingBackend) -> None:
    """The paragraph has the numbers."""
    _post(backend)
    backend.wait_for(lambda seen: len(seen.accepted) == 3, 60)
    with pytest.raises(EnvironmentProblem, match="1 requests, 3 records accepted"):
        backend.wait_for(lambda seen: len(seen.accepted) == 4, 0.05)
