"""Consumer groups: the list, and one group with its members, its lag, and a reset of its offsets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace_console.actions import Action, action_button
from headrace_console.parts import heading, number, path_of
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

GROUPS: Final = "/groups"
_SECONDS: Final = 5.0
_MOST_SHOWN: Final = 100
_LIST: Final = (
    TableColumn("group", "Group"),
    TableColumn("state", "State", "state"),
    TableColumn("members", "Members", "number"),
)
_MEMBERS: Final = (
    TableColumn("client", "Member"),
    TableColumn("host", "Host"),
    TableColumn("static", "Static id"),
    TableColumn("partitions", "Assigned partitions"),
    TableColumn("member", "Member id"),
)
_OFFSETS: Final = (
    TableColumn("at", "Partition"),
    TableColumn("committed", "Committed", "number"),
    TableColumn("end", "End", "number"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("member", "Assigned to"),
)


@page("/groups", "Groups", position=50)
async def groups(view: View) -> None:
    """Build the list."""
    table = Table("Consumer groups", _LIST, empty="the cluster has no group that you may read")

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        link = path_of("/group", name=one["group"])
        return {**one, "members": number(one["members"]), "_level": level_of(one["state"]), "_link": link}

    await view.follow(GROUPS, lambda found: table.show(map(row, found["groups"])), seconds=_SECONDS)


@page("/group", "Group")
async def group(view: View) -> None:
    """Build the page of the group in `name`."""
    name = view.query.get("name", "")
    path = f"{GROUPS}/{quote(name, safe='')}"
    heading(name)
    facts = ui.label()
    with ui.row():
        action_button(view, "Reset offsets", _reset(view, name, path))
    members = Table("Members", _MEMBERS, empty="no member is active: its offsets may be reset")
    offsets = Table("Offsets", _OFFSETS, empty="the group has committed no offset")

    def show(found: Mapping[str, Any]) -> None:
        facts.set_text(
            f"{found['state']}, protocol {found['protocol'] or '-'}, assignor {found['assignor'] or '-'}, "
            f"coordinator {found['coordinator']}, lag {number(found['lag'])}"
        )
        owner = {at: one["client"] for one in found["members"] for at in one["partitions"]}
        members.show(
            {**one, "static": one["static_id"] or "", "partitions": ", ".join(one["partitions"]), "_key": one["member"]}
            for one in found["members"]
        )
        offsets.show(
            {
                "at": f"{one['topic']}-{one['partition']}",
                "committed": number(one["committed"]),
                "end": number(one["end_offset"]),
                "lag": number(one["lag"]),
                "member": owner.get(f"{one['topic']}-{one['partition']}", ""),
            }
            for one in found["offsets"]
        )

    await view.follow(path, show)


def level_of(state: str) -> str:
    """Return the level of Kafka's word for the state of a group."""
    return "ok" if state.lower() in ("stable", "empty") else "warn"


def position_body(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a reset; raises ValueError if a field is not a position or number."""
    to = fields.get("to", "")
    if not to:
        raise ValueError("a position is needed: earliest, latest, an offset, a shift or a time")
    body: dict[str, Any] = {"time": to}
    if to in ("earliest", "latest"):
        body = {"to": to}
    elif re.fullmatch(r"\d{1,19}", to):
        body = {"offset": int(to)}
    elif re.fullmatch(r"[+-]\d{1,19}", to):
        body = {"shift": int(to)}
    if fields.get("topic"):
        body["topic"] = fields["topic"]
    if partitions := fields.get("partitions"):
        if not re.fullmatch(r"\d+( *, *\d+)*", partitions):
            raise ValueError("partitions are whole numbers: 0, 3")
        body["partitions"] = [int(one) for one in partitions.split(",")]
    return body


def _reset(view: View, name: str, path: str) -> Action:
    async def preview(body: Mapping[str, Any]) -> str:
        reply = await view.send("POST", f"{path}/offsets", {**body, "dry_run": True})
        return _preview_of(reply.body)

    fields = {
        "to": "Position: earliest, latest, an offset, a shift such as -100, or a time such as 2h",
        "topic": "Topic (none for all)",
        "partitions": "Partitions of the topic (none for all)",
    }
    return Action(f"Reset {name}", "POST", f"{path}/offsets", {}, fields, position_body, "", preview)


def _preview_of(found: Mapping[str, Any]) -> str:
    lines = [
        f"{one['topic']}-{one['partition']}: from {number(one['before'])} to {number(one['after'])}, "
        f"then {number(one['lag'])} records are left to read"
        for one in found["offsets"][:_MOST_SHOWN]
    ]
    if more := len(found["offsets"]) - len(lines):
        lines.append(f"and {more} more")
    if found["members"]:
        lines.insert(0, f"the group has {found['members']} active members: stop its consumers first")
    return "\n".join(lines)
