"""Audit: its newest events, read from its topic by an instance of an active consumer that commits nothing."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace.console.server_api import ApiProblem
from headrace.console.table import Table, TableColumn
from headrace.console.view import View, page

_DEFAULT: Final = "sidecar-audit"
_EVENTS: Final = (100, 500, 2_000)
_GROUP: Final = "headrace-console"
_READ_SECONDS: Final = 10.0
_COLUMNS: Final = (
    TableColumn("time", "Time", "number"),
    TableColumn("status", "Status", "state"),
    TableColumn("type", "Type"),
    TableColumn("who", "Who"),
    TableColumn("what", "What"),
    TableColumn("where", "Where"),
    TableColumn("why", "Reason"),
    TableColumn("id", "Correlation id"),
)
_LEVELS: Final = {"SUCCESS": "ok", "FAILURE": "bad", "DENIED": "bad"}


@page("/audit", "Audit", position=110)
async def audit(view: View) -> None:
    """Build the page."""
    destination = ui.label()
    topic = await _topic_of(view, destination)
    with ui.row().classes("items-end"):
        field = ui.input("Topic of the audit", value=view.query.get("topic", topic)).props("dense")
        count = ui.radio([*_EVENTS], value=_EVENTS[0]).props("inline dense")
        count.props["aria-label"] = "Newest events of each partition"
        again = ui.button("Read the audit", color=None).props("outline no-caps dense").classes("hr-button")
    problem = ui.label().classes("hr-problem")
    problem.props["role"] = "status"
    table = Table("Newest events", _COLUMNS, empty="no event was read")

    async def read() -> None:
        problem.set_text("")
        try:
            found = await _newest(view, (field.value or "").strip(), count.value)
        except ApiProblem as refused:
            problem.set_text(str(refused))
            return
        rows = [
            row_of(one["value"], one)
            for one in found
            if isinstance(one.get("value"), Mapping) and not _is_own(one["value"])
        ]
        table.show(sorted(rows, key=lambda row: row["_at"], reverse=True))

    again.on_click(read)
    field.on("keydown.enter", read)
    if field.value:
        await read()


async def _topic_of(view: View, destination: ui.label) -> str:
    """Say where the settings let the audit go, and return its topic; empty if it goes to none."""
    try:
        settings = (await view.get("/adm/server/info"))["component"]["audit"]
    except (ApiProblem, LookupError, TypeError):
        return _DEFAULT
    if settings["to"] == "topic":
        destination.set_text(
            f"This process writes {settings['records']} events of records to the topic {settings['topic']}. "
            "Those of the reads of this page are left out."
        )
        return str(settings["topic"])
    where = f"the file {settings['file']} on its machine" if settings["to"] == "file" else "nowhere"
    destination.set_text(
        f"This process writes its audit to {where}. With audit.to: topic in headrace.yaml it can be read here; "
        "a topic that another process writes can be read by its name."
    )
    return ""


async def _newest(view: View, topic: str, count: int) -> list[Any]:
    """Read the newest events of each partition.

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
        return await _read(view, base, {one["partition"]: ends[one["partition"]] for one in offsets})
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


def row_of(event: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an event; each of its fields may be missing."""
    at = event.get("timestamp") or 0
    about = [str(event[name]) for name in ("action", "target") if event.get(name)]
    if event.get("count"):
        about.append(f"{event['count']} records")
    if event.get("address"):
        about.append(f"from {event['address']}")
    return {
        "time": f"{datetime.fromtimestamp(at / 1000).astimezone():%Y-%m-%d %H:%M:%S}",
        "status": str(event.get("auditStatus", "")),
        "type": str(event.get("auditType", "")),
        "who": " ".join(filter(None, (event.get("caller", ""), event.get("group", "")))),
        "what": " ".join(about),
        "where": _positions(event),
        "why": str(event.get("reason") or event.get("stacktrace") or ""),
        "id": str(event.get("correlationId", "")),
        "_key": f"{record['partition']}-{record['offset']}",
        "_at": at,
        "_level": _LEVELS.get(event.get("auditStatus", ""), "warn"),
    }


def _positions(event: Mapping[str, Any]) -> str:
    ranges: Sequence[Mapping[str, Any]] = event.get("ranges") or ([event] if event.get("topic") else [])
    return ", ".join(
        f"{one['topic']}-{one.get('partition')} {one.get('offset')}"
        + (f" to {one['lastOffset']}" if one.get("lastOffset") is not None else "")
        for one in ranges
    )
