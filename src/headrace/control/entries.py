"""The entries of the control table by which consumers are steered, with names in the spelling of URLs.

hold/<consumer>[/<topic>/<partition>]              paused, until it is taken away
settings/<consumer>                                settings in place of the file's
seek/<consumer>/<topic>/<partition>/<id>           a command, taken away by the process that has done it
skip/<consumer>/<topic>/<partition>/<id>           the same, and taken away once its commit is old
done/<id>/<topic>/<partition>                      what became of a command, for an hour
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from headrace.config.consumers import BatchConfig, DeliveryConfig
from headrace.delivery.live import LiveSettings
from headrace.records import TopicPartition

log = logging.getLogger(__name__)


class Command(NamedTuple):
    """A seek or skip that is not done."""

    key: str
    action: str
    partition: TopicPartition
    offset: int
    entry: Mapping[str, Any]
    id: str
    """Names what was asked at once."""

    @property
    def done(self) -> str:
        """Key of what became of it."""
        return key_of("done/", self.id, *self.partition)


class Place(NamedTuple):
    """What the key of an entry speaks of."""

    name: str
    partition: TopicPartition | None
    id: str


def key_of(prefix: str, *parts: object) -> str:
    """Return the key of an entry."""
    return prefix + "/".join(quote(str(part), safe="") for part in parts)


def paused_text(entry: Mapping[str, Any]) -> str:
    """Return who has something stand still, since when and why, in one sentence."""
    reason = f": {entry['reason']}" if entry.get("reason") else ""
    return f"paused by {entry.get('by') or 'anonymous'} since {spelled(entry.get('since'))}{reason}"


def spelled(seconds: Any) -> str:
    """Return a time (seconds since the epoch) in ISO 8601; empty if it is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def live_settings(delivery: DeliveryConfig, changed: Mapping[str, Any]) -> LiveSettings:
    """Return the settings of the file, with those in their place that were changed.

    Raises:
        ValueError: They are not allowed, by the rules of the file.
    """
    new = delivery
    if changed:
        given = delivery.model_dump(exclude_unset=True)
        batch = {name: changed[name] for name in BatchConfig.model_fields if changed.get(name) is not None}
        given["batch"] = {**given.get("batch", {}), **batch}
        if changed.get("max_in_flight") is not None:
            given["max_in_flight"] = changed["max_in_flight"]
        new = type(delivery).model_validate(given)
    rate = changed.get("rate_records")
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < 1e9):
        raise ValueError(f"a rate is more than 0 records per second, and less than 1e9; this is {rate!r}")
    return LiveSettings(rate, new.batch.max_records, new.batch.max_bytes, new.batch.linger_seconds, new.max_in_flight)


def place_of(key: str) -> Place | None:
    """Return what a key speaks of; None, with an alarm, if it is none of ours."""
    name, *place = [unquote(part) for part in key.split("/")[1:]]
    try:
        return Place(name, TopicPartition(place[0], int(place[1])) if place else None, "".join(place[2:]))
    except (ValueError, LookupError):
        log.error("the control table has the entry %r, which is passed over: its name is none", key)
        return None


def command_of(key: str, entry: Mapping[str, Any]) -> Command | None:
    """Return the seek or skip that an entry is; None if it is none."""
    place, offset = place_of(key), entry.get("offset")
    if not (place and place.partition and place.id) or not isinstance(offset, int):
        return None
    return Command(key, key.partition("/")[0], place.partition, offset, entry, place.id)
