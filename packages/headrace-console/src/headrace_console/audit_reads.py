"""Events of the audit: read from its topic by an instance of an active consumer that commits nothing."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from headrace_console.server_api import ApiProblem
from headrace_console.view import View

_DEFAULT: Final = "sidecar-audit"
_GROUP: Final = "headrace-console"
_READ_SECONDS: Final = 10.0
_EVENT_SECONDS: Final = 2.0
_EVENTS: Final = 50
_PAUSE_SECONDS: Final = 0.2


async def event_of(view: View, correlation_id: str) -> str:
    """Return in a line what the audit has of a request; empty if that cannot be read within two seconds."""
    with contextlib.suppress(ApiProblem, TimeoutError):
        async with asyncio.timeout(_EVENT_SECONDS):
            topic, _ = await audit_topic(view)
            while topic:
                events = [one["value"] for one in await newest_events(view, topic, _EVENTS)]
                mine = [one for one in events if one.get("correlationId") == correlation_id]
                for event in sorted(mine, key=lambda one: one.get("auditType") != "CONTROL"):
                    reason = f", reason: {why(event)}" if why(event) else ""
                    return f"{event.get('auditStatus', '')} {who(event)} {about(event)}{reason}"
                await asyncio.sleep(_PAUSE_SECONDS)
    return ""


async def audit_topic(view: View) -> tuple[str, str]:
    """Return the topic of the audit, empty if it goes to none, and where the settings let it go in a sentence."""
    try:
        settings = (await view.get("/adm/server/info"))["component"]["audit"]
    except (ApiProblem, LookupError, TypeError):
        return _DEFAULT, ""
    if settings["to"] == "topic":
        sentence = (
            f"This process writes {settings['records']} events of records to the topic {settings['topic']}. "
            "Those of the reads of this page are left out."
        )
        return str(settings["topic"]), sentence
    where = f"the file {settings['file']} on its machine" if settings["to"] == "file" else "nowhere"
    return "", (
        f"This process writes its audit to {where}. With audit.to: topic in headrace.yaml it can be read here; "
        "a topic that another process writes can be read by its name."
    )


async def newest_events(view: View, topic: str, count: int) -> list[Any]:
    """Read the newest records of each partition that are events, without those that reads of the console make.

    Raises:
        ApiProblem: The topic is not there, or may not be read.
    """
    partitions = (await view.get(f"/topics/{quote(topic, safe='')}"))["partitions"]
    offsets = [
        {"topic": topic, "partition": one["partition"], "offset": max(one["first_offset"], one["end_offset"] - count)}
        for one in partitions
        if one["end_offset"] > one["first_offset"]
    ]
    if not offsets:
        return []
    ends = {one["partition"]: one["end_offset"] for one in partitions}
    group = f"{_GROUP}-{secrets.token_hex(6)}"
    settings = {"format": "json", "keyFormat": "string", "autoCommitEnable": False, "autoOffsetReset": "earliest"}
    base = (await view.send("POST", f"/consumers/{group}", settings)).body["base_uri"]
    try:
        await view.send("POST", f"{base}/assignments", {"partitions": [_partition(one) for one in offsets]})
        await view.send("POST", f"{base}/positions", {"offsets": offsets})
        found = await _read(view, base, {one["partition"]: ends[one["partition"]] for one in offsets})
        return [one for one in found if isinstance(one.get("value"), Mapping) and not _is_own(one["value"])]
    finally:
        with contextlib.suppress(ApiProblem):
            await view.send("DELETE", base)


async def _read(view: View, base: str, ends: Mapping[int, int]) -> list[Any]:
    found: list[Any] = []
    left = dict(ends)
    until = time.monotonic() + _READ_SECONDS
    while left and time.monotonic() < until:
        records = await view.get(f"{base}/records", {"timeout": 1000})
        found += records
        for one in records:
            if one["offset"] + 1 >= left.get(one["partition"], 0):
                left.pop(one["partition"], None)
        if found and not records:
            break  # the last offsets have no record
    return found


def _is_own(event: Mapping[str, Any]) -> bool:
    """Return whether a read of this page has made an event."""
    return f"{event.get('group', '')} {event.get('target', '')}".find(f"{_GROUP}-") >= 0


def _partition(offset: Mapping[str, Any]) -> dict[str, Any]:
    return {"topic": offset["topic"], "partition": offset["partition"]}


def who(event: Mapping[str, Any]) -> str:
    """Return whose event it is: the caller and the group, as far as it has them."""
    return " ".join(filter(None, (event.get("caller", ""), event.get("group", ""))))


def about(event: Mapping[str, Any]) -> str:
    """Return what was done, to what."""
    found = [str(event[name]) for name in ("action", "target") if event.get(name)]
    if event.get("count"):
        found.append(f"{event['count']} records")
    if event.get("address"):
        found.append(f"from {event['address']}")
    return " ".join(found)


def why(event: Mapping[str, Any]) -> str:
    """Return the reason, or the error."""
    return str(event.get("reason") or event.get("stacktrace") or "")


def positions(event: Mapping[str, Any]) -> str:
    """Return which records it is about."""
    ranges: Sequence[Mapping[str, Any]] = event.get("ranges") or ([event] if event.get("topic") else [])
    return ", ".join(
        f"{one['topic']}-{one.get('partition')} {one.get('offset')}"
        + (f" to {one['lastOffset']}" if one.get("lastOffset") is not None else "")
        for one in ranges
    )
