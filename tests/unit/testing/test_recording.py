"""Recording is read as it was written: seeded records, the backend's journal, the broker's record of a commit."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
from pathlib import Path
from urllib.parse import urlsplit

from headrace_devkit.testing import PlannedResponse, RecordingBackend
from headrace_devkit.testing.recording import read_journal


def test_the_journal_has_every_attempt_with_its_end(tmp_path: Path) -> None:
    """What was answered as processed has ended; what failed, or was answered by half, has not."""
    backend = RecordingBackend(journal=tmp_path / "journal")
    backend.script.extend(
        [
            PlannedResponse(fails=lambda record: record["offset"] == 3),
            PlannedResponse(cut_after_bytes=1),
            PlannedResponse(503),
        ]
    )
    backend.start()
    for request in ((2, 3), (3,), (3,), (3,)):
        body = [{"deliveryId": f"g:h:t:1:{o}", "offset": o, "key": None, "value": f"v{o}"} for o in request]
        target = urlsplit(backend.url)
        connection = http.client.HTTPConnection(target.netloc)
        connection.request("POST", target.path, json.dumps(body))
        with contextlib.suppress(http.client.HTTPException, ConnectionError), connection.getresponse() as response:
            response.read()
        connection.close()
    backend.stop()
    (attempts,) = read_journal(tmp_path / "journal").values()
    ended = [attempt.ended_at < math.inf for attempt in attempts]
    assert [(a.request, a.offset, a.key, a.value) for a in attempts] == [
        (0, 2, None, b"v2"), (0, 3, None, b"v3"), (1, 3, None, b"v3"), (2, 3, None, b"v3"), (3, 3, None, b"v3"),
    ]  # fmt: skip
    assert ended == [True, False, False, False, True]
    assert all(attempt.at <= attempt.ended_at for attempt in attempts)
    assert (backend.requests, backend.accepted, backend.accepted_records) == ([], [], 2)
