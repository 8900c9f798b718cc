"""One topic: its partitions, settings and records, and what can be done with it; and one record in full."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from nicegui import background_tasks, ui

from headrace_console.actions import Action, action_row, dry_run
from headrace_console.pages.topics_page import SETTINGS_LABEL, changes_text, topic_body
from headrace_console.parts import badge, change_badge, excerpt, heading, link, number, path_of, text_in, visible
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.topic_records import (
    MOST_PARTITIONS,
    RecordQuery,
    TopicRecord,
    contains,
    read_records,
    read_slice,
    topic_path,
)
from headrace_console.view import View, page

WRITE: Final = ("kafka:w", "admin")
MOST_CHARACTERS: Final = 100_000
_EXCERPT: Final = 300
_LIVE_ROWS: Final = 200
_LIVE_BATCH: Final = 100
_SETTINGS_SECONDS: Final = 30.0
_SCHEMA_SECONDS: Final = 60.0
_PARTITIONS: Final = (
    TableColumn("at", "Partition", "number"),
    TableColumn("state", "State", "state"),
    TableColumn("leader", "Leader", "number"),
    TableColumn("in_sync", "In-sync replicas"),
    TableColumn("replicas", "Replicas"),
    TableColumn("first", "First offset", "number"),
    TableColumn("end", "End offset", "number"),
)
_RECORDS: Final = (
    TableColumn("at", "Record"),
    TableColumn("time", "Time"),
    TableColumn("key", "Key"),
    TableColumn("value", "Value"),
    TableColumn("headers", "Headers"),
    TableColumn("formats", "Key and value format"),
)


@page("/topic", "Topic")
async def topic(view: View) -> None:
    """Build the page of the topic in `name`."""
    one = OneTopic(view, view.query.get("name", ""))
    await view.follow(one.path, one.show)
    await view.follow(f"{one.path}/configs", one.show_settings, seconds=_SETTINGS_SECONDS)
    with one.schemas:
        for part in ("key", "value"):
            await _link_schema(view, f"{view.query.get('name', '')}-{part}")
    await view.follow("/tables", one.sql.show, seconds=_SETTINGS_SECONDS, optional=True)
    await one.records.read()


class OneTopic:
    """The page of one topic."""

    def __init__(self, view: View, name: str) -> None:
        self.path = topic_path(name)
        self._view = view
        self._name = name
        self._details: Mapping[str, Any] = {}
        heading(name)
        self._state = badge("", "ok")
        self._facts = ui.label()
        self.schemas = ui.row()
        action_row(view, self._actions())
        self.records = TopicRecords(view, name)
        self.sql = TopicSql(view, name)
        self._partitions = Table("Partitions", _PARTITIONS, empty="no partition")
        self._settings = Table(
            "Settings", [TableColumn("name", "Setting"), TableColumn("value", "Value"), TableColumn("source", "Set by")]
        )

    def show(self, details: Mapping[str, Any]) -> None:
        """Show the state of the topic."""
        self._details = details
        problems = details["under_replicated"]
        text = f"{problems} partitions have a problem" if problems else "every partition is replicated"
        change_badge(self._state, text, "bad" if problems else "ok")
        self._facts.set_text(
            f"{number(len(details['partitions']))} partitions, replication factor {details['replication_factor']}, "
            f"{number(details['records'])} records (offsets, with the gaps of compaction and transactions)"
        )
        self._partitions.show(map(_partition_row, details["partitions"]))
        self.records.moved({one["partition"]: one["end_offset"] for one in details["partitions"]})

    def show_settings(self, found: Mapping[str, Any]) -> None:
        """Show the settings, the changed ones first."""
        ordered = sorted(found["configs"], key=lambda one: (one["is_default"], one["name"]))
        self._settings.show(
            {"name": one["name"], "value": one["value"], "source": one["source"].replace("_", " ")} for one in ordered
        )

    def _actions(self) -> dict[str, Action]:
        alter = Action(
            f"Change {self._name}",
            "PATCH",
            self.path,
            fields={"configs": SETTINGS_LABEL + "; NAME= for the default"},
            shape=topic_body,
            reason="",
            preview=dry_run(self._view, "PATCH", self.path, changes_text),
            outcome=changes_text,
        )
        return {
            "Produce a record": produce_action(self._name, tombstone=False),
            "Produce a tombstone": produce_action(self._name, tombstone=True),
            "Change settings": alter,
            "Add partitions": alter._replace(
                title=f"Add partitions to {self._name}", fields={"partitions": "Partitions in all"}
            ),
            "Delete": Action(
                f"Delete {self._name}",
                "DELETE",
                self.path,
                fields={"confirm": "Name of the topic again"},
                shape=self._confirmed,
                reason="",
                preview=self._preview_delete,
                query={"confirm": self._name},
            ),
        }

    def _confirmed(self, fields: Mapping[str, str]) -> Mapping[str, Any]:
        if fields.get("confirm") != self._name:
            raise ValueError(f"write {self._name} to delete it with all its records")
        return {}

    async def _preview_delete(self, _: Mapping[str, Any]) -> str:
        await self._view.refresh()
        count = number(self._details.get("records"))
        return f"{self._name} and its {count} records would be deleted, for every reader and for ever"


async def _link_schema(view: View, subject: str) -> None:
    """Show a link to a subject, if the registry has it."""
    shown = link(f"Schema {subject}", "/schema", name=subject)
    shown.set_visibility(False)

    def show(found: Mapping[str, Any]) -> None:
        shown.set_visibility(any(one["subject"] == subject for one in found["subjects"]))

    # By name, so the subject itself is the first with this prefix.
    path = f"/schemas?{urlencode({'prefix': subject, 'limit': 1})}"
    await view.follow(path, show, seconds=_SCHEMA_SECONDS, optional=True)


class TopicRecords:
    """Records of a topic, and those that arrive while the page is visible."""

    def __init__(self, view: View, name: str) -> None:
        self._view = view
        self._name = name
        self._ends: dict[int, int] = {}
        self._live: LiveRecords | None = None
        with ui.element("div").classes("hr-bar"):
            self._start = ui.input("From: newest, oldest, an offset or a time", value="newest").classes("hr-wide")
            self._partition = ui.input("Partition (none for all)")
            self._text = ui.input("Text in key, value or header")
            button = ui.button("Read", on_click=self.read, color=None).props("outline no-caps dense")
            self._turning = ui.button("Live", on_click=self._turn, color=None).props("outline no-caps dense")
        button.classes("hr-button")
        self._turning.classes("hr-button")
        self._note = ui.label()
        self._note.props["role"] = "status"
        self._table = Table("Records", _RECORDS, empty="no record")

    async def read(self) -> None:
        """Read what the fields select, and show it."""
        self._stop()
        try:
            query = self._chosen()
            found = await read_records(self._view, self._name, query)
        except (ApiProblem, ValueError) as problem:
            self._report(str(problem))
            return
        partial = "" if found.complete else "; a limit ended the search: choose a partition, or a nearer start"
        cut = query.partition is None and len(self._ends) > MOST_PARTITIONS
        few = f"; only the first {MOST_PARTITIONS} partitions" if cut else ""
        self._report(f"{number(found.read)} records read, {len(found.records)} shown{few}{partial}")
        self._show(found.records)

    def moved(self, ends: Mapping[int, int]) -> None:
        """Take the ends of the partitions; if new records are followed, read them."""
        self._ends = {**ends}
        if self._live:
            background_tasks.create(self._live.read(ends), name="live records")

    def _chosen(self) -> RecordQuery:
        partition = (self._partition.value or "").strip()
        if partition and not partition.isdecimal():
            raise ValueError("a partition is a whole number")
        start = (self._start.value or "newest").strip()
        return RecordQuery(start, int(partition) if partition else None, self._text.value or "")

    def _turn(self) -> None:
        if self._live:
            self._stop()
            return
        try:
            query = self._chosen()
        except ValueError as problem:
            self._report(str(problem))
            return
        chosen = sorted(self._ends)[:MOST_PARTITIONS] if query.partition is None else [query.partition]
        starts = {number: self._ends[number] for number in chosen if number in self._ends}
        self._live = LiveRecords(self._view, self._name, starts, query.text)
        self._live.on_records, self._live.on_report = self._show, self._report
        self._turning.set_text("Stop")
        self._report("waiting for new records; while this tab is hidden nothing is read")
        self._show([])

    def _stop(self) -> None:
        if self._live:
            self._live.stop()
        self._live = None
        self._turning.set_text("Live")

    def _show(self, records: Iterable[TopicRecord]) -> None:
        self._table.show(record_row(self._name, one) for one in records)

    def _report(self, text: str) -> None:
        self._note.set_text(visible(text))


class LiveRecords:
    """New records of some partitions: a bounded number, read when the end of a partition has moved."""

    on_records: Callable[[list[TopicRecord]], None]
    on_report: Callable[[str], None]

    def __init__(self, view: View, topic: str, starts: Mapping[int, int], text: str) -> None:
        self._view = view
        self._topic = topic
        self._text = text
        self._next = {**starts}
        """Offset to read next by partition."""
        self._records: list[TopicRecord] = []
        self._left_out = 0
        self._busy = False
        self._stopped = False

    def stop(self) -> None:
        """Show nothing any more."""
        self._stopped = True

    async def read(self, ends: Mapping[int, int]) -> None:
        """Read what has arrived before these ends, in each partition at most a batch, the newest."""
        if self._busy:
            return
        self._busy = True
        try:
            for partition in [*self._next]:
                await self._read(partition, ends.get(partition, 0))
        except ApiProblem as problem:
            self.on_report(str(problem))
            return
        finally:
            self._busy = False
        if self._stopped or not (self._records or self._left_out):
            return
        self._records = sorted(self._records, key=lambda one: (one.at, one.offset), reverse=True)[:_LIVE_ROWS]
        out = f"; {number(self._left_out)} left out because they were too many" if self._left_out else ""
        self.on_report(f"live: the newest {len(self._records)} records{out}")
        self.on_records(self._records)

    async def _read(self, partition: int, end: int) -> None:
        at = self._next[partition]
        if at >= end or self._stopped:
            return
        start = max(at, end - _LIVE_BATCH)
        part = await read_slice(self._view, self._topic, partition, start, _LIVE_BATCH)
        self._left_out += start - at
        self._next[partition] = max(part.following, at)
        self._records += [one for one in part.records if contains(one, self._text)]


class TopicSql:
    """A SELECT over the tables that this topic is kept in, where the process has any."""

    def __init__(self, view: View, name: str) -> None:
        self._view = view
        self._name = name
        self._tables: list[str] = []
        with ui.element("div").classes("hr-wide") as self._section:
            heading("SQL")
            self._note = ui.label()
            self._statement = ui.textarea("SELECT").classes("hr-wide")
            ui.button("Run", on_click=self._run, color=None).props("outline no-caps dense").classes("hr-button")
            self._problem = ui.label().classes("hr-problem")
            self._problem.props["role"] = "status"
            self._result = ui.element("div")
        self._section.set_visibility(False)

    def show(self, found: Mapping[str, Any]) -> None:
        """Show which tables have the topic."""
        tables = [one["name"] for one in found["tables"] if one["topic"] == self._name]
        self._section.set_visibility(bool(tables))
        self._note.set_text(f"tables of this topic: {', '.join(tables)}")
        if tables and not self._statement.value:
            self._statement.set_value(f'SELECT * FROM "{tables[0]}" LIMIT 50')

    async def _run(self) -> None:
        self._problem.set_text("")
        try:
            found = (await self._view.send("POST", "/query", {"sql": self._statement.value, "limit": 500})).body
        except ApiProblem as problem:
            self._problem.set_text(visible(problem))
            return
        self._result.clear()
        with self._result:
            show_result(found)


def show_result(found: Mapping[str, Any]) -> None:
    """Show the rows of a statement. The names of its columns are foreign, so they are not names of a row."""
    names = [one["name"] for one in found["columns"]]
    columns = [TableColumn(f"c{index}", visible(name)) for index, name in enumerate(names)]
    table = Table("Result" + (" (there are more rows)" if found["more"] else ""), columns, empty="no row")
    table.show(
        {"_key": number, **{f"c{index}": excerpt(_cell(row.get(name)), _EXCERPT) for index, name in enumerate(names)}}
        for number, row in enumerate(found["rows"])
    )


@page("/record", "Record")
async def record(view: View) -> None:
    """Build the page of the record in `topic`, `partition` and `offset`."""
    name, partition, offset = (view.query.get(one, "") for one in ("topic", "partition", "offset"))
    heading(f"{name}-{partition} offset {offset}")
    ui.link("The topic", path_of("/topic", name=name))
    try:
        part = await read_slice(view, name, int(partition), int(offset), 1)
    except (ApiProblem, ValueError) as problem:
        ui.label(visible(problem)).classes("hr-problem")
        return
    found = next((one for one in part.records if one.offset == int(offset)), None)
    if found is None:
        ui.label("this record is not there any more: it was compacted, or its transaction was aborted")
        return
    ui.label(f"written {found.at}")
    text_block(f"Key ({found.key_format})", found.key)
    text_block(f"Value ({found.value_format})", found.value)
    header_table(found.headers)


def header_table(headers: list[tuple[str, str]] | list[list[str]]) -> None:
    """Show headers in their order."""
    table = Table("Headers", [TableColumn("name", "Name"), TableColumn("value", "Value")], empty="no header")
    table.show({"name": name, "value": value, "_key": index} for index, (name, value) in enumerate(headers))


def text_block(title: str, text: str) -> None:
    """Show a text of several lines under a title; a very long one is cut."""
    heading(title)
    block = text_in("pre", excerpt(text, MOST_CHARACTERS)).classes("hr-result")
    block.props.update({"tabindex": "0", "role": "region", "aria-label": title})


def record_row(topic: str, one: TopicRecord) -> dict[str, Any]:
    """Return the row of a record."""
    at = {"topic": topic, "partition": str(one.partition), "offset": str(one.offset)}
    return {
        "at": f"{one.partition}:{one.offset}",
        "time": one.at,
        "key": excerpt(one.key, _EXCERPT),
        "value": "(tombstone)" if one.value_format == "null" else excerpt(one.value, _EXCERPT),
        "headers": excerpt(", ".join(f"{name}: {value}" for name, value in one.headers), _EXCERPT),
        "formats": f"{one.key_format} / {one.value_format}",
        "_link": path_of("/record", **at),
    }


def produce_action(topic: str, *, tombstone: bool) -> Action:
    """Return the action that writes one record."""
    value = {} if tombstone else {"value": "Value", "valueFormat": "Format of the value; json if empty"}
    return Action(
        f"Produce a {'tombstone' if tombstone else 'record'} to {topic}",
        "POST",
        f"/producers/{topic_path(topic).removeprefix('/topics/')}",
        fields={
            "key": "Key",
            "keyFormat": "Format of the key; string if empty",
            **value,
            "headers": "Headers, one NAME=VALUE per line",
            "partition": "Partition; by the key if empty",
        },
        shape=lambda fields: produce_body(fields, tombstone=tombstone),
        reason="",
        preview=preview_produce,
        scopes=WRITE,
        multiline=("key", "value", "headers"),
        outcome=produced_text,
    )


async def preview_produce(body: Mapping[str, Any]) -> str:
    """Return the request that would be sent; the API has no dry run for it."""
    return json.dumps(body, ensure_ascii=False, indent=1)


def produce_body(fields: Mapping[str, str], *, tombstone: bool) -> dict[str, Any]:
    """Return the body that writes a record; raises ValueError for a field that does not fit."""
    key_format = fields.get("keyFormat", "string").lower()
    value_format = fields.get("valueFormat", "json").lower()
    record: dict[str, Any] = {"value": None}
    if "key" in fields:
        key_format, record["key"] = _typed("key", fields["key"], key_format)
    if not tombstone:
        if "value" not in fields:
            raise ValueError("the value is empty: a record without a value is a tombstone, which has its own button")
        value_format, record["value"] = _typed("value", fields["value"], value_format)
    elif "key" not in fields:
        raise ValueError("a tombstone deletes the record of a key: name the key")
    if "partition" in fields:
        if not fields["partition"].isdecimal():
            raise ValueError("a partition is a whole number")
        record["partition"] = int(fields["partition"])
    pairs = [line.partition("=") for line in fields.get("headers", "").splitlines() if line.strip()]
    if not all(equals and name for name, equals, _ in pairs):
        raise ValueError("headers are NAME=VALUE, one in each line")
    if pairs:
        record["headers"] = [[name, value] for name, _, value in pairs]
    return {"keyFormat": key_format, "valueFormat": value_format, "records": [record]}


def produced_text(found: Mapping[str, Any]) -> str:
    """Return where a record is, or why it is not."""
    one = found["offsets"][0]
    return (
        f"partition {one['partition']}, offset {one['offset']}" if "offset" in one else f"not written: {one['error']}"
    )


def _typed(name: str, text: str, form: str) -> tuple[str, Any]:
    """Return the format to request and the JSON of a key or value. JSON is written byte for byte, as a string."""
    if form == "string":
        return form, text
    try:
        found = json.loads(text)
    except ValueError as problem:
        if form == "json":
            raise ValueError(f"the {name} is not JSON: {problem}. Correct it, or choose the format string") from None
        return form, text  # base64, or what the API refuses
    return ("string", text) if form == "json" else (form, found)


def _partition_row(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at": one["partition"],
        "state": one["problem"] or "replicated",
        "leader": number(one["leader"]),
        "in_sync": ", ".join(str(replica["broker"]) for replica in one["replicas"] if replica["in_sync"]),
        "replicas": ", ".join(str(replica["broker"]) for replica in one["replicas"]),
        "first": number(one["first_offset"]),
        "end": number(one["end_offset"]),
        "_level": "bad" if one["problem"] else "ok",
    }


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
