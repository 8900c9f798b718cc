"""What a backend's `Retry-After` asks for.

Source: RFC 9110 section 10.2.3; reliability.md E4.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Final

MAX_WAIT_SECONDS: Final = 300.0


def retry_after_seconds(value: str, now: float) -> float | None:
    """Return how long to leave a backend alone, at most 300 s; None where its own words do not help.

    Args:
        value: The header: whole seconds or an HTTP date. Anything else, and what is not in the future, is no help.
        now: Seconds since the epoch.
    """
    text = value.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text[:20])
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, OverflowError, TypeError):
            return None
    return min(seconds, MAX_WAIT_SECONDS) if seconds > 0 else None
