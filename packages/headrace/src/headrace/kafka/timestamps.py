"""Points in time: as Kafka stores them, and as people write them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from headrace.errors import InvalidRequest

_LAST_MS: Final = 253_402_300_799_000  # the end of the year 9999
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_time(text: str, now_seconds: float | None = None) -> datetime:
    """Return the point in time that a text names: ISO 8601, UTC where no zone is given.

    Args:
        now_seconds: The current time, since the epoch; with it the text may also be an age (`90s`, `15m`, `2h`, `1d`).

    Raises:
        ValueError: It is not a point in time.
    """
    if now_seconds is not None and (age := re.fullmatch(r"(\d{1,9})([smhd])", text)):
        try:
            moment = datetime.fromtimestamp(now_seconds, UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
        except OverflowError:
            moment = datetime.fromtimestamp(0, UTC)
        return max(moment, datetime.fromtimestamp(0, UTC))
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def milliseconds(moment: datetime) -> int:
    """Return a point in time as Kafka stores it."""
    return int(moment.timestamp() * 1000)


def milliseconds_of(time: int | str, now_seconds: float) -> int:
    """Return the time that a request names: milliseconds since the epoch, ISO 8601, or an age.

    Raises:
        InvalidRequest: It is not valid. Negative times have special meanings in Kafka.
    """
    try:
        found = time if isinstance(time, int) else milliseconds(parse_time(time, now_seconds))
    except (ValueError, OverflowError):
        found = -1
    if 0 <= found <= _LAST_MS:
        return found
    raise InvalidRequest(
        f"{str(time)[:60]!r} is not a valid time: write 2026-01-31T12:00:00Z, 2h, or milliseconds since the epoch"
    )


def moment(milliseconds: int) -> datetime:
    """Return a timestamp of Kafka as a point in time."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def iso_ms(milliseconds: int) -> str:
    """Return a timestamp of Kafka as ISO 8601, UTC; as a number if it is outside the calendar."""
    if not 0 <= milliseconds <= _LAST_MS:
        return str(milliseconds)
    return moment(milliseconds).isoformat(timespec="milliseconds")
