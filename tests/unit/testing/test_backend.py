from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace_devkit.testing import PlannedResponse, RecordingBackend

RECORDS = [{"topic": "t", "partition": 0, "offset": offset, "value": offset} for offset in range(3)]


def _post(backend: RecordingBackend, body: Any = RECORDS) -> tuple[int, Any]:
    target = urlsplit(backend.url)
    with contextlib.closing(http.client.HTTPConnection(target.netloc)) as connection:
        connection.request("POST", target.path, json.dumps(body), {"X-Attempt": "2"})
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())


def test_the_script_is_used_before_the_response(backend: RecordingBackend) -> None:
    """Each scripted response is used once, in order; the backend records every request."""
    backend.script.extend([PlannedResponse(503), PlannedResponse(fails=lambda record: record["offset"] == 1)])
    backend.response = PlannedResponse(body={"no": "results"})
    assert _post(backend)[0] == 503
    assert _post(backend)[1] == [{"record": r, "processed": r["offset"] != 1} for r in RECORDS]
    assert _post(backend) == (200, {"no": "results"})
    assert [record["offset"] for record in backend.accepted] == [0, 2]
    assert len(backend.records) == 9
    assert {(one.path, one.headers["x-attempt"]) for one in backend.requests} == {("/kafka/records", "2")}


def test_a_response_can_break_off(backend: RecordingBackend) -> None:
    """Before its first byte or within it; its records are not accepted."""
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
