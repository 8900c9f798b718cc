"""Durations as Go writes them: `10s`, `1m30s`, `250ms`. Source: Go's time.ParseDuration."""

from __future__ import annotations

import re

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([+-]?)(0|(?:{_PART})+)", re.ASCII)


def parse_duration(text: str) -> float:
    """Return seconds.

    Raises:
        ValueError: The text is no duration; a bare number other than 0 is none.
    """
    whole = _WHOLE.fullmatch(text)
    if not whole:
        raise ValueError(f"{text!r} is no duration: write a number with a unit, such as 10s, 1m30s or 250ms")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, whole[2]))
    return -seconds if whole[1] == "-" else seconds
