"""Recording is read as it was written: seeded records, the backend's journal, the broker's record of a commit."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headrace.records import Record, TopicPartition
from headrace_devkit.testing import PlannedResponse, RecordingBackend
from headrace_devkit.testing.history import Commit
from headrace_devkit.testing.recording import decode_commit, read_journal

KEY = b"\x00\x01\x00\x01g\x00\x01t\x00\x00\x00\x07"
LONG = "m" * 300
VALUES = [
    (b"\x00\x03" + (12).to_bytes(8, "big") + b"\xff" * 4 + b"\x00\x04meta" + (1500).to_bytes(8, "big"), "meta"),
    (
        b"\x00\x04" + (12).to_bytes(8, "big") + b"\xff" * 4 + b"\x06meta\x00" + (1500).to_bytes(8, "big") + b"\x00",
        "meta",
    ),
    (
        b"\x00\x04" + (12).to_bytes(8, "big") + b"\xff" * 4 + b"\xad\x02" + LONG.encode() + (1500).to_bytes(8, "big"),
        LONG,
    ),
]


@pytest.mark.parametrize(("value", "metadata"), VALUES, ids=["version 3", "version 4", "long"])
def test_a_commit_is_decoded(value: bytes, metadata: str) -> None:
    """Group, partition, offset, metadata and time, without the end of a C string that the client library sends."""
    found = decode_commit(Record("o", 0, 0, 0, KEY, value))
    assert found == ("g", TopicPartition("t", 7), Commit(1.5, 12, metadata))


@pytest.mark.parametrize(
    ("key", "value"), [(KEY, None), (b"\x00\x02\x00\x01g", b"\x00\x03x")], ids=["taken-back", "members"]
)
def test_what_is_not_a_commit_is_passed(key: bytes, value: bytes | None) -> None:
    """Offsets that were deleted, and what a group says of its members."""
    assert decode_commit(Record("o", 0, 0, 0, key, value)) is None


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
