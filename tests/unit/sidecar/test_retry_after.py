"""`Retry-After`: honoured up to a cap, and only where it makes sense."""

from __future__ import annotations

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sidecar.reactive.http_destination import MAX_WAIT_SECONDS, retry_after_seconds

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 120 ", 120.0),
        ("301", 300.0),
        ("315360000", 300.0),
        ("9" * 5000, 300.0),
        (formatdate(NOW + 42, usegmt=True), 42.0),
        (formatdate(NOW + 42), 42.0),  # zone -0000: universal time all the same
        (formatdate(NOW + 315_360_000, usegmt=True), 300.0),
    ],
)
def test_seconds_and_dates_are_honoured_up_to_the_cap(value: str, seconds: float) -> None:
    """Whole seconds and HTTP dates; ten years are five minutes."""
    assert retry_after_seconds(value, NOW) == seconds


@pytest.mark.parametrize(
    "value",
    [
        *("", "0", "-5", "+5", "1.5", "1e3", "soon", "٣", "5 s", "5, 7", "Fri, 99 Foo 2026", "nan", "inf"),
        *(formatdate(NOW - 1, usegmt=True), "Mon, 01 Jan 99999 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 +2359"),
    ],
)
def test_what_makes_no_sense_leaves_the_own_back_off(value: str) -> None:
    """Zero, negative, past, fractions and words say nothing."""
    assert retry_after_seconds(value, NOW) is None


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_no_header_breaks_it(value: str) -> None:
    """Whatever a backend writes, the wait is none or sensible."""
    seconds = retry_after_seconds(value, NOW)
    assert seconds is None or (math.isfinite(seconds) and 0 < seconds <= MAX_WAIT_SECONDS)
