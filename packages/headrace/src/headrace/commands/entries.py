"""The entries of the control table for consumers. Names in keys are percent-encoded as in URLs.

hold/<consumer>[/<topic>/<partition>]              paused, until the entry is removed
settings/<consumer>                                settings that replace those of the file
seek/<consumer>/<topic>/<partition>/<id>           a command; the process that finished it writes the outcome into it
skip/<consumer>/<topic>/<partition>/<id>           and then removes it
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from headrace.config.consumers import BatchConfig, DeliveryConfig, ReactiveConsumerConfig
from headrace.delivery.status import SettingsInForce
from headrace.records import TopicPartition

log = logging.getLogger(__name__)


class ParsedKey(NamedTuple):
    """The parts of a key after its prefix."""

    name: str
    partition: TopicPartition | None
    id: str


class Command(NamedTuple):
    """A seek or skip in the table."""

    key: str
    action: str
    partition: TopicPartition
    offset: int
    entry: Mapping[str, Any]
    id: str
    """The same for all partitions of one request."""

    @property
    def outcome(self) -> str:
        """Its outcome so far; empty if no process has run it."""
        return str(self.entry.get("outcome", ""))

    @property
    def is_finished(self) -> bool:
        """Whether the command is done; not while it waits for the record that it will skip."""
        return self.outcome not in ("", "will be skipped")


def key_of(prefix: str, *parts: object) -> str:
    """Return the key of an entry."""
    return prefix + "/".join(quote(str(part), safe="") for part in parts)


def paused_text(entry: Mapping[str, Any]) -> str:
    """Return one sentence: who paused it, since when, and why."""
    reason = f": {entry['reason']}" if entry.get("reason") else ""
    return f"paused by {entry.get('by') or 'anonymous'} since {iso_time(entry.get('since'))}{reason}"


def iso_time(seconds: Any) -> str:
    """Return seconds since the epoch in ISO 8601; empty if they are not a valid time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def live_settings(delivery: DeliveryConfig, changed: Mapping[str, Any]) -> SettingsInForce:
    """Return the settings of the file with the changed ones.

    Raises:
        ValueError: They are not allowed, by the rules of the file.
    """
    new = delivery
    if changed:
        # A registered consumer is validated like one of the file: its backend was accepted already.
        kind = ReactiveConsumerConfig if isinstance(delivery, ReactiveConsumerConfig) else type(delivery)
        given = {name: getattr(delivery, name) for name in delivery.model_fields_set & kind.model_fields.keys()}
        batch = {name: changed[name] for name in BatchConfig.model_fields if changed.get(name) is not None}
        given["batch"] = {**delivery.batch.model_dump(exclude_unset=True), **batch}
        if changed.get("max_in_flight") is not None:
            given["max_in_flight"] = changed["max_in_flight"]
        new = kind.model_validate(given)
    rate = changed.get("rate_records")
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < 1e9):
        raise ValueError(f"the rate must be more than 0 and less than 1e9 records per second, not {rate!r}")
    return SettingsInForce(
        rate, new.batch.max_records, new.batch.max_bytes, new.batch.linger_seconds, new.max_in_flight
    )


def parse_key(key: str) -> ParsedKey | None:
    """Return the parts of a key; None, with an error in the log, if it has another form."""
    name, *rest = [unquote(part) for part in key.split("/")[1:]]
    try:
        return ParsedKey(name, TopicPartition(rest[0], int(rest[1])) if rest else None, "".join(rest[2:]))
    except (ValueError, LookupError):
        log.error("ignored a control table entry whose key %r has an unknown form", key)
        return None


def command_of(key: str, entry: Mapping[str, Any]) -> Command | None:
    """Return the seek or skip of an entry; None if it has another form."""
    parsed, offset = parse_key(key), entry.get("offset")
    if not (parsed and parsed.partition and parsed.id) or not isinstance(offset, int):
        return None
    return Command(key, key.partition("/")[0], parsed.partition, offset, entry, parsed.id)
