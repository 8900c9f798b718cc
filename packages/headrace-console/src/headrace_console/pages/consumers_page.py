"""Consumers: the list, and one consumer with its partitions and what can be done with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace_console.actions import Action, action_row, confirm
from headrace_console.pages.overview_page import CONSUMERS, CONTROL, LIST_COLUMNS, row_of, state_of
from headrace_console.parts import ago, badge, change_badge, heading, number
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

_MOST_SHOWN: Final = 20
_PARTITIONS: Final = (
    TableColumn("at", "Partition"),
    TableColumn("state", "State", "state"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("flight", "In flight", "number"),
    TableColumn("position", "Position", "number"),
    TableColumn("committed", "Committed", "number"),
    TableColumn("head", "First open"),
    TableColumn("member", "Member"),
    TableColumn("why", "Why"),
)


@page("/consumers", "Consumers", position=20)
async def consumers(view: View) -> None:
    """Build the list."""
    table = Table("Consumers and functions", LIST_COLUMNS, empty="no consumer and no function runs in this process")
    await view.follow(CONSUMERS, lambda found: table.show(row_of(one, view.history) for one in found["consumers"]))


@page("/consumer", "Consumer")
async def consumer(view: View) -> None:
    """Build the page of the consumer in `name`."""
    one = OneConsumer(view, view.query.get("name", ""))
    await view.follow(one.path, one.show)


class OneConsumer:
    """The page of one consumer."""

    def __init__(self, view: View, name: str) -> None:
        self.path = f"{CONSUMERS}/{quote(name, safe='')}"
        self._view = view
        self._name = name
        self._details: Mapping[str, Any] = {}
        heading(name)
        self._state = badge("", "ok")
        self._facts = ui.label()
        action_row(view, self._actions())
        self._partitions = Table(
            "Partitions",
            _PARTITIONS,
            empty="no partition",
            buttons={
                "Pause": self._on_partition("Pause"),
                "Resume": self._on_partition("Resume"),
                "Skip": self._skip_head,
            },
            refusal=view.session.problem_with(*CONTROL),
        )
        self._commands = Table(
            "Pending commands", [TableColumn("what", "Command"), TableColumn("by", "By"), TableColumn("why", "Why")]
        )

    def show(self, details: Mapping[str, Any]) -> None:
        """Show the status of the consumer."""
        self._details = details
        state, level = state_of(details)
        change_badge(self._state, state, level)
        settings = details["settings"]
        rate = settings.get("rateRecords")
        self._facts.set_text(
            f"{details['kind']} of group {details['group']}, reads {', '.join(details['topics'])}, delivers to "
            f"{details['destination']}; lag {number(details['lag'])}, in flight {number(details['inFlight'])}, "
            f"{f'at most {number(rate)} records/s' if rate else 'no rate limit'}. {details['why']}"
        )
        self._partitions.show(map(_row, sorted(details["partitions"], key=lambda one: not one["why"])))
        self._commands.show(
            {"what": f"{one['action']} {one['topic']}-{one['partition']} at {one['offset']}"}
            | {"by": f"{one['by']}, {ago(one['at'])} ago", "why": one["reason"], "_key": one["id"]}
            for one in details["commands"]
        )

    def _actions(self) -> dict[str, Action]:
        pause = Action(f"Pause {self._name}", "POST", f"{self.path}/pause", scopes=CONTROL, query={})
        where = {"partition": "Partition (none for all)", "topic": "Topic, if it reads several"}
        target = {"to": "Position: earliest, latest, an offset, or a time such as 2026-01-31T12:00"}
        return {
            "Pause": pause,
            "Resume": pause._replace(title=f"Resume {self._name}", path=f"{self.path}/resume"),
            "Seek": pause._replace(
                title=f"Seek {self._name}",
                path=f"{self.path}/seek",
                fields=target | where,
                shape=seek_body,
                preview=self._preview_seek,
            ),
            "Skip a record": self._skip({"partition": "Partition", "offset": "Offset", "topic": where["topic"]}),
            "Limit the rate": pause._replace(
                title=f"Limit {self._name}",
                method="PATCH",
                path=f"{self.path}/settings",
                fields={"rate": "Records per second in each process; empty for no limit"},
                shape=rate_body,
                reason="",
                preview=self._preview_rate,
            ),
        }

    def _skip(self, fields: Mapping[str, str], body: Mapping[str, Any] = MappingProxyType({})) -> Action:
        title, path = f"Skip a record of {self._name}", f"{self.path}/skip"
        return Action(title, "POST", path, body, fields, numbers_of, "required", self._preview_skip, scopes=CONTROL)

    def _on_partition(self, verb: str) -> Callable[[str], None]:
        def press(key: str) -> None:
            one = self._partition(key)
            body = {"topic": one["topic"], "partitions": [one["partition"]]}
            confirm(self._view, Action(f"{verb} {key}", "POST", f"{self.path}/{verb.lower()}", body, scopes=CONTROL))

        return press

    def _skip_head(self, key: str) -> None:
        one = self._partition(key)
        offset = one["head"]["offset"] if one["head"] else one["position"]
        confirm(self._view, self._skip({}, {"topic": one["topic"], "partition": one["partition"], "offset": offset}))

    def _partition(self, key: str) -> Mapping[str, Any]:
        return next(one for one in self._details["partitions"] if name_of(one) == key)

    async def _preview_seek(self, body: Mapping[str, Any]) -> str:
        await self._view.refresh()
        return seek_preview(self._details["partitions"], body)

    async def _preview_rate(self, body: Mapping[str, Any]) -> str:
        now = self._details["settings"]["rateRecords"]
        return f"now {now or 'no limit'}, then {body['rateRecords'] or 'no limit'}, in every process and after restarts"

    async def _preview_skip(self, body: Mapping[str, Any]) -> str:
        topic = body.get("topic") or self._details["topics"][0]
        path = f"/topics/{quote(topic, safe='')}/partitions/{body['partition']}/records"
        found = await self._view.get(path, {"offset": body["offset"], "count": 1})
        records = found if isinstance(found, list) else found.get("records", [])
        shown = json.dumps(records[0], ensure_ascii=False, indent=1) if records else "no record is there any more"
        return f"{topic}-{body['partition']} offset {body['offset']} will never be delivered:\n{shown}"


def name_of(partition: Mapping[str, Any]) -> str:
    """Return the name of a partition."""
    return f"{partition['topic']}-{partition['partition']}"


def numbers_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a skip.

    Raises:
        ValueError: A field is missing, or is not a number.
    """
    if not all(fields.get(name, "0").isdecimal() for name in ("partition", "offset")):
        raise ValueError("partition and offset are whole numbers")
    return {name: int(value) if name != "topic" else value for name, value in fields.items()}


def rate_body(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a new rate; raises ValueError if it is not a number."""
    return {"rateRecords": float(fields["rate"]) if fields.get("rate") else None}


def seek_body(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a seek; raises ValueError without a position."""
    to = fields.get("to", "")
    if not to:
        raise ValueError("a position is needed: earliest, latest, an offset or a time")
    target: dict[str, Any] = (
        {"to": to} if to in ("earliest", "latest") else {"offset": int(to)} if to.isdecimal() else {"time": to}
    )
    if fields.get("partition"):
        target["partitions"] = [int(fields["partition"])]
    return target | ({"topic": fields["topic"]} if fields.get("topic") else {})


def seek_preview(partitions: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> str:
    """Return what a seek would do in each partition that it names."""
    chosen = [
        one
        for one in partitions
        if one["partition"] in body.get("partitions", [one["partition"]])
        and one["topic"] == body.get("topic", one["topic"])
    ]
    lines = []
    for one in chosen[:_MOST_SHOWN]:
        now = one["position"] if one["position"] is not None else one["committed"]
        to = one["end"] if body.get("to") == "latest" else body.get("offset")
        if now is None or to is None:
            goal = (
                "the first record that is still there"
                if body.get("to") == "earliest"
                else f"{body.get('time', 'the end')}"
            )
            lines.append(f"{name_of(one)}: from {number(now)} to {goal}")
        else:
            what = (
                f"{number(now - to)} records are delivered again"
                if to < now
                else f"{number(to - now)} records are left out"
            )
            lines.append(f"{name_of(one)}: from {number(now)} to {number(to)}: {what}")
    more = len(chosen) - len(lines)
    return "\n".join(lines or ["no partition has this name"]) + (f"\nand {more} more" if more > 0 else "")


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    head = one["head"]
    moving = not one["why"]
    return {
        "at": name_of(one),
        "state": "paused" if one["paused"] else "elsewhere" if not one["assigned"] else "moving" if moving else "waits",
        "lag": number(one["lag"]),
        "flight": number(one["inFlight"]),
        "position": number(one["position"]),
        "committed": number(one["committed"]),
        "head": f"offset {head['offset']}, {head['attempts']} attempts" if head else "",
        "member": one["member"],
        "why": one["why"],
        "_level": "ok" if moving else "warn",
    }
