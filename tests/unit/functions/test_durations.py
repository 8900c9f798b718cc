"""Go's durations."""

from __future__ import annotations

import pytest

from headrace.functions.spec import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10),
        ("1m30s", 90),
        ("250ms", 0.25),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("3us", 3e-6),
        ("3µs", 3e-6),
        ("7ns", 7e-9),
        ("0", 0),
        ("-2s", -2),
        ("+2s", 2),
    ],
)
def test_what_go_reads_is_read(text: str, seconds: float) -> None:
    """Each unit and form of Go's grammar."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "s", "10 s", "10S", "1s1", "1.s.", "--1s", "٣s", "1d"])
def test_what_go_refuses_is_refused(text: str) -> None:
    """Bare numbers, blanks, other units and other digits are no durations."""
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)
