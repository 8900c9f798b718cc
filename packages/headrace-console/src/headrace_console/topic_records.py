"""Records of topics as text: read in slices of a partition, exactly as they are, and shown in a format that fits.

It needs no group: the API reads partitions at any offset.
"""

from __future__ import annotations

import base64
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from headrace_console.view import View

MOST_PARTITIONS: Final = 32
"""Partitions that are read for one view of a topic."""
_SLICE_RECORDS: Final = 500
_SLICE_BYTES: Final = 2_097_152
_SEARCHED_RECORDS: Final = 10_000
_SEARCH_SECONDS: Final = 8.0
_CORRELATION: Final = "X-Correlation-Id"
_NO_GROUP: Final = "headrace-console-preview"
"""A group for previews of offsets at a time; nothing is committed in it."""


class TopicRecord(NamedTuple):
    """A record as text."""

    partition: int
    offset: int
    at: str
    """Its timestamp, ISO 8601, UTC."""
    key: str
    key_format: str
    value: str
    value_format: str
    """`string`, `binary` (base64), `null`, or `schema` with its id."""
    headers: list[tuple[str, str]]


class RecordSlice(NamedTuple):
    """Records of a partition, and where to continue."""

    records: list[TopicRecord]
    following: int
    end: int


class FoundRecords(NamedTuple):
    """What a view of a topic shows."""

    records: list[TopicRecord]
    read: int
    """Records that were read for it."""
    complete: bool
    """Whether everything from the start on was searched."""


class RecordQuery(NamedTuple):
    """Which records of a topic."""

    start: str = "newest"
    """`newest`, `oldest`, an offset, or a time in ISO 8601."""
    partition: int | None = None
    text: str = ""
    """In key, value or a header, in any case."""
    most: int = 50


def topic_path(topic: str) -> str:
    """Return the path of a topic in the API."""
    return f"/topics/{quote(topic, safe='')}"


async def read_records(view: View, topic: str, query: RecordQuery) -> FoundRecords:
    """Read the records of a topic that a query selects, newest first unless it has another start.

    Raises:
        ApiProblem: It was refused.
        ValueError: The start is none, or the partition is not there; the text is for people.
    """
    ranges = await _ranges(view, topic, query)
    share = max(1, _SEARCHED_RECORDS // max(1, len(ranges))) if query.text else query.most
    until = time.monotonic() + _SEARCH_SECONDS
    found: list[TopicRecord] = []
    read, complete = 0, True
    for partition, (first, end) in ranges.items():
        start = max(first, end - share) if query.start == "newest" else first
        kept: deque[TopicRecord] = deque(maxlen=query.most)
        async for part in _slices(view, topic, partition, (start, min(end, start + share)), until):
            read += len(part.records)
            kept.extend(one for one in part.records if contains(one, query.text))
            if query.start != "newest" and len(kept) == query.most:
                break
        complete = (
            complete and (not query.text or (start == first and end - start <= share)) and time.monotonic() < until
        )
        found.extend(kept)
    ordered = sorted(found, key=lambda one: (one.at, one.offset), reverse=query.start == "newest")
    return FoundRecords(ordered[: query.most], read, complete)


async def _slices(
    view: View, topic: str, partition: int, span: tuple[int, int], until: float
) -> AsyncIterator[RecordSlice]:
    at, end = span
    while at < end and time.monotonic() < until:
        part = await read_slice(view, topic, partition, at, min(_SLICE_RECORDS, end - at))
        yield part
        if part.following <= at:
            return
        at = part.following


async def read_slice(view: View, topic: str, partition: int, offset: int, count: int) -> RecordSlice:
    """Return records of a partition from an offset on; raises ApiProblem if it is refused."""
    path = f"{topic_path(topic)}/partitions/{partition}/records"
    query = {"offset": offset, "count": count, "max_bytes": _SLICE_BYTES}
    found = await view.get(path, {**query, "format": "auto"})
    return RecordSlice([*map(_record, found["records"])], found["next_offset"], found["end_offset"])


def contains(record: TopicRecord, text: str) -> bool:
    """Return whether a text is in key, value or a header, in any case."""
    needle = text.casefold()
    parts = (record.key, record.value, *(part for header in record.headers for part in header))
    return not needle or any(needle in part.casefold() for part in parts)


def moment_of(text: str) -> str:
    """Return a time with its zone; without one it is that of this machine. Raises ValueError if it is not a time."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except ValueError:
        raise ValueError(f"{text} is not a valid time; write it as 2026-01-31T12:00") from None


async def _ranges(view: View, topic: str, query: RecordQuery) -> dict[int, tuple[int, int]]:
    """Return the offsets to read by partition."""
    found = (await view.get(topic_path(topic)))["partitions"]
    known = {one["partition"]: (one["first_offset"], one["end_offset"]) for one in found}
    if query.partition is not None and query.partition not in known:
        raise ValueError(f"partition {query.partition} is not there: {topic} has 0 to {len(known) - 1}")
    chosen = [query.partition] if query.partition is not None else sorted(known)[:MOST_PARTITIONS]
    ranges = {number: known[number] for number in chosen}
    if query.start in ("newest", "oldest"):
        return ranges
    if query.start.isdecimal():
        offset = int(query.start)
        return {number: (min(max(offset, first), end), end) for number, (first, end) in ranges.items()}
    body = {"topic": topic, "time": moment_of(query.start), "partitions": chosen, "dry_run": True}
    preview = (await view.send("POST", f"/groups/{_NO_GROUP}/offsets", body)).body
    return {one["partition"]: (one["after"], ranges[one["partition"]][1]) for one in preview["offsets"]}


def _record(raw: Mapping[str, Any]) -> TopicRecord:
    at = datetime.fromtimestamp(raw["timestamp"] / 1000, UTC).isoformat(timespec="milliseconds")
    (key, key_format), (value, value_format) = _text(raw, "key"), _text(raw, "value")
    return TopicRecord(raw["partition"], raw["offset"], at, key, key_format, value, value_format, [*_headers(raw)])


def _headers(raw: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return the headers in their order, without the id that the API adds; bytes that are not text are escaped."""
    own = f"{raw['topic']}:{raw['partition']}:{raw['offset']}"
    if "headerList" not in raw:
        found = [(name, "null" if value is None else value) for name, value in raw["headers"].items()]
        return (one for one in found if one != (_CORRELATION, own))
    exact = ((one["name"], one["value"]) for one in raw["headerList"])
    return ((name, "null" if value is None else _escaped(base64.b64decode(value))) for name, value in exact)


def _escaped(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _text(raw: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a key or value as text, and its format."""
    found, value = raw[f"{name}Format"], raw.get(name, "")
    return json.dumps(value, ensure_ascii=False) if found.startswith("schema") else value, found
