"""Correlation ids."""

from __future__ import annotations

import base64
import time
import uuid

from headrace.runtime.telemetry.correlation import new_correlation_id


def as_uuid(identity: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=base64.urlsafe_b64decode(identity + b"=="))


def test_an_id_is_a_uuid_of_version_7_in_22_characters() -> None:
    """As the original's: URL-safe base64 without padding, the time in front."""
    before = time.time_ns() // 1_000_000
    identity = new_correlation_id()
    found = as_uuid(identity)
    assert len(identity) == 22
    assert (found.version, found.variant) == (7, uuid.RFC_4122)
    assert before <= found.int >> 80 <= time.time_ns() // 1_000_000
    assert base64.urlsafe_b64encode(found.bytes).rstrip(b"=") == identity
