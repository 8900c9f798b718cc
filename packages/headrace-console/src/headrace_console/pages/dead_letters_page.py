"""Dead letters: topics that have some, those of one topic by cause, one in full, and what can be done with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from nicegui import background_tasks, ui

from headrace_console.actions import Action, action_button, confirm, dry_run
from headrace_console.pages.topic_page import header_table, text_block
from headrace_console.parts import excerpt, heading, number, path_of, visible
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.topic_records import moment_of
from headrace_console.view import View, page

DEAD_LETTERS: Final = "/adm/dead-letters"
DEAD_LETTER_SECONDS: Final = 10.0
JOBS: Final = "/adm/jobs"
TOPIC_PAGE: Final = "/dead-letter-topic"
KINDS: Final = ("redrive", "quarantine", "drop")
_SEARCH_SECONDS: Final = 30.0
_PAGE: Final = 50
_EXCERPT: Final = 300
_MOST_CAUSES: Final = 20
_CAUSES: Final = 3
_FILTER: Final = {
    "error": "Error class",
    "topic": "Origin topic",
    "group": "Group",
    "key": "Key",
    "header": "Header, NAME=VALUE",
    "text": "Text in error, reason or excerpt",
    "partition": "Partition",
    "since": "Since, such as 2026-01-31T12:00",
    "until": "Until",
    "state": "State: left, completed or all",
}
_SELECTS: Final = {"error": "errors", "topic": "topics", "group": "groups", "key": "keys"}
"""Fields of a search that a run has as lists."""
_STATES: Final = {"running": "ok", "done": "ok", "failed": "bad"}
_BUTTONS: Final = {"running": ["Pause", "Stop"], "waiting": ["Pause", "Stop"], "paused": ["Resume", "Stop"]}
_DEAD_LETTERS: Final = (
    TableColumn("at", "Dead letter"),
    TableColumn("time", "Time"),
    TableColumn("error", "Error"),
    TableColumn("reason", "Reason"),
    TableColumn("origin", "Origin"),
    TableColumn("writer", "Writer"),
    TableColumn("attempts", "Attempts", "number"),
    TableColumn("key", "Key"),
    TableColumn("value", "Value"),
    TableColumn("state", "State", "state"),
)


@page("/dead-letters", "Dead letters", position=30)
async def dead_letters(view: View) -> None:
    """Build the list of topics."""
    one = DeadLetterList(view)
    await view.follow(DEAD_LETTERS, one.show, seconds=DEAD_LETTER_SECONDS)
    ui.timer(1.0, one.look)


class DeadLetterList:
    """The topics, and the causes of what is left, which are counted by reading."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._topics: list[Mapping[str, Any]] = []
        self._causes: dict[tuple[str, int], str] = {}
        columns = [TableColumn("topic", "Topic"), TableColumn("left", "Left", "number")]
        columns += [TableColumn("causes", "Causes of a day"), TableColumn("all", "In the topic", "number")]
        columns += [TableColumn("newest", "Newest"), TableColumn("oldest", "Oldest")]
        self._table = Table("Topics of dead letters", columns, empty="no topic has dead letters")

    def show(self, found: Mapping[str, Any]) -> None:
        """Show the numbers, topics with the most dead letters left first."""
        self._topics = sorted(found["topics"], key=lambda one: (-one["left"], one["topic"]))
        self._draw()

    async def look(self) -> None:
        """Count the causes where the number of what is left is new."""
        for one in self._topics[:_MOST_CAUSES]:
            known = one["topic"], one["left"]
            if not one["left"] or known in self._causes or not self._view.visible:
                continue
            try:
                found = await self._view.get(f"{_path(one['topic'])}/statistics", {"state": "left"})
                most = [*found["errors"].items()][:_CAUSES]
                more = len(found["errors"]) - len(most)
                names = ", ".join(f"{name} {number(count)}" for name, count in most)
                self._causes[known] = names + (f", and {more} more" if more else "")
            except ApiProblem as problem:
                self._causes[known] = str(problem)
            self._draw()

    def _draw(self) -> None:
        self._table.show(
            {
                "topic": one["topic"],
                "left": number(one["left"]),
                "causes": self._causes.get((one["topic"], one["left"]), ""),
                "all": number(one["deadLetters"]),
                "newest": one["newest"] or "",
                "oldest": one["oldest"] or "",
                "_link": path_of(TOPIC_PAGE, name=one["topic"]),
            }
            for one in self._topics
        )


@page(TOPIC_PAGE, "Dead letters of a topic")
async def dead_letter_topic(view: View) -> None:
    """Build the page of the dead letter topic in `name`; the rest of the query is the filter."""
    one = DeadLetterSearch(view, view.query.get("name", ""))
    await view.follow(JOBS, one.jobs.show)
    if not one.problem:
        query = f"?{urlencode(one.query)}"
        await view.follow(f"{one.path}{query}&limit={_PAGE}", one.show, seconds=_SEARCH_SECONDS)
        await view.follow(f"{one.path}/statistics{query}", one.show_causes, seconds=_SEARCH_SECONDS)


class DeadLetterSearch:
    """The dead letters of a topic that a filter selects."""

    def __init__(self, view: View, name: str) -> None:
        self.problem = ""
        self._view = view
        self._name = name
        self._given = {field: text for field in _FILTER if (text := view.query.get(field, "").strip())}
        self._given.setdefault("state", "left")
        self.query: dict[str, str] = {}
        """The filter as the API takes it."""
        try:
            self.query = search_query(self._given)
        except ValueError as problem:
            self.problem = str(problem)
        self._found: list[Mapping[str, Any]] = []
        self._cursor = ""
        heading(name)
        self._fields()
        with ui.row():
            for kind in KINDS:
                label = f"{kind.capitalize()} these"
                action_button(view, label, run_action(view, name, kind, lambda: selection_of(self._given)))
        self._causes = Table(
            "Causes", [TableColumn("name", "Name"), TableColumn("by", "By"), TableColumn("count", "Count", "number")]
        )
        self._table = Table(
            "Dead letters",
            _DEAD_LETTERS,
            empty="none: the filter selects no dead letter",
            buttons={kind.capitalize(): self._one(kind) for kind in KINDS},
            refusal=view.session.problem_with("admin"),
        )
        self._note = ui.label(visible(self.problem))
        self._note.props["role"] = "status"
        self._more = ui.button("More", on_click=self._continue, color=None).props("outline no-caps dense")
        self._more.classes("hr-button").set_visibility(False)
        self.jobs = TopicJobs(view, name)

    @property
    def path(self) -> str:
        """Path of the topic's dead letters in the API."""
        return _path(self._name)

    def show(self, found: Mapping[str, Any]) -> None:
        """Show the first page."""
        self._found = []
        self._add(found)

    def show_causes(self, found: Mapping[str, Any]) -> None:
        """Show the numbers by cause; each error and topic is a link that selects it."""
        parts = {"errors": "error", "topics": "topic", "writers": "writer", "statuses": "HTTP status", "times": "hour"}
        self._causes.show(
            {"name": name, "by": by, "count": number(count), "_key": f"{by} {name}"}
            | ({"_link": path_of(TOPIC_PAGE, name=self._name, **{**self._given, by: name})} if by in _FILTER else {})
            for part, by in parts.items()
            for name, count in found[part].items()
        )

    def _fields(self) -> None:
        with ui.element("div").classes("hr-bar"):
            inputs = {name: ui.input(label, value=self._given.get(name, "")) for name, label in _FILTER.items()}

            def search() -> None:
                given = {name: text for name, one in inputs.items() if (text := (one.value or "").strip())}
                ui.navigate.to(path_of(TOPIC_PAGE, name=self._name, **given))

            for one in inputs.values():
                one.on("keydown.enter", search)
            ui.button("Search", on_click=search, color=None).props("outline no-caps dense").classes("hr-button")

    def _one(self, kind: str) -> Callable[[str], None]:
        def press(key: str) -> None:
            partition, _, offset = key.partition(":")
            confirm(self._view, one_action(self._view, self._name, kind, int(partition), int(offset)))

        return press

    async def _continue(self) -> None:
        try:
            self._add(await self._view.get(self.path, {**self.query, "limit": _PAGE, "cursor": self._cursor}))
        except ApiProblem as problem:
            self._note.set_text(visible(problem))

    def _add(self, found: Mapping[str, Any]) -> None:
        self._found += found["deadLetters"]
        self._cursor = found["cursor"]
        self._more.set_visibility(bool(self._cursor))
        foreign = f"; {number(found['foreign'])} records are not dead letters" if found["foreign"] else ""
        self._note.set_text(
            f"{number(len(self._found))} found, up to {number(found['remaining'])} records not read yet{foreign}"
        )
        self._table.show(map(dead_letter_row, [{**one, "in": self._name} for one in self._found]))


@page("/dead-letter", "Dead letter")
async def dead_letter(view: View) -> None:
    """Build the page of the dead letter in `topic`, `partition` and `offset`."""
    name, partition, offset = (view.query.get(one, "") for one in ("topic", "partition", "offset"))
    heading(f"{name}-{partition} offset {offset}")
    ui.link("All dead letters of this topic", path_of(TOPIC_PAGE, name=name))
    ui.link("Its bytes as they are stored", path_of("/record", topic=name, partition=partition, offset=offset))
    query = {"partition": partition, "first": offset, "last": offset, "limit": 1}
    try:
        found = (await view.get(_path(name), query))["deadLetters"]
    except ApiProblem as problem:
        ui.label(visible(problem)).classes("hr-problem")
        return
    if not found:
        ui.label("this dead letter is not there any more")
        return
    with ui.row():
        for kind in KINDS:
            action_button(view, kind.capitalize(), one_action(view, name, kind, int(partition), int(offset)))
    one = found[0]
    table = Table("History", [TableColumn("name", "What"), TableColumn("value", "Value")])
    table.show({"name": title, "value": value} for title, value in history_of(one).items() if value not in ("", 0))
    text_block(f"Key ({one['keyFormat']})", _text(one["key"]))
    text_block(f"Value ({one['valueFormat']})", _text(one["value"]))
    header_table([(title, "null" if value is None else value) for title, value in one["headers"]])
    if one["excerpt"]:
        text_block("Response", one["excerpt"])
    if one["stackTrace"] not in ("", one["reason"], one["excerpt"]):
        text_block("Stack trace", one["stackTrace"])


def history_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what happened to a dead letter, in the order of its life."""
    origin = one["origin"]
    return {
        "origin": f"{origin['topic']}-{origin['partition']} offset {origin['offset']}, {origin['timestamp']}",
        "writer": one["writer"],
        "group": one["group"],
        "first failure": one["firstFailure"],
        "last failure": one["lastFailure"],
        "attempts": one["attempts"],
        "redrives": one["redrives"],
        "error": one["error"],
        "HTTP status": one["status"],
        "reason": one["reason"],
        **{f"result {name}": text for name, text in one["result"].items()},
        "written": one["timestamp"],
        "state": "completed" if one["completed"] else "left",
    }


def dead_letter_row(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a dead letter."""
    origin = one["origin"]
    at = {"topic": one["in"], "partition": str(one["partition"]), "offset": str(one["offset"])}
    return {
        "at": f"{one['partition']}:{one['offset']}",
        "time": one["timestamp"],
        "error": one["error"],
        "reason": excerpt(one["reason"], _EXCERPT),
        "origin": f"{origin['topic']}-{origin['partition']} offset {origin['offset']} of {one['group']}",
        "writer": one["writer"],
        "attempts": number(one["attempts"]) if one["attempts"] else "unknown",
        "key": excerpt(_text(one["key"]), _EXCERPT),
        "value": excerpt(_text(one["value"]), _EXCERPT),
        "state": "completed" if one["completed"] else "left",
        "_level": "ok" if one["completed"] else "warn",
        "_link": path_of("/dead-letter", **at),
        "_buttons": [] if one["completed"] else [kind.capitalize() for kind in KINDS],
    }


def search_query(given: Mapping[str, str]) -> dict[str, str]:
    """Return a filter as the API takes it; raises ValueError if a time is none."""
    times = {name: moment_of(given[name]) for name in ("since", "until") if name in given}
    return {**given, **times}


def selection_of(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a run's body that selects the same dead letters as a search.

    Raises:
        ValueError: The API cannot select them.
    """
    if "text" in given:
        raise ValueError("a run cannot select by a text: search by error, topic, group, key, header or time instead")
    query = search_query(given)
    body: dict[str, Any] = {field: [query[name]] for name, field in _SELECTS.items() if name in query}
    body |= {name: query[name] for name in ("since", "until") if name in query}
    if "partition" in query:
        if not query["partition"].isdecimal():
            raise ValueError("a partition is a whole number")
        body["partition"] = int(query["partition"])
    if "header" in query:
        name, equals, value = query["header"].partition("=")
        if not equals:
            raise ValueError("a header is NAME=VALUE")
        body["headers"] = {name: value}
    return body


def one_action(view: View, topic: str, kind: str, partition: int, offset: int) -> Action:
    """Return the action on one dead letter."""
    return run_action(view, topic, kind, lambda: {"partition": partition, "first": offset, "last": offset})


def run_action(view: View, topic: str, kind: str, select: Callable[[], Mapping[str, Any]]) -> Action:
    """Return the action that redrives, moves or drops what is selected, as a job; its preview is the API's dry run."""
    fields = {"rate": "Dead letters per second; any rate if empty"}
    if kind == "redrive":
        fields |= {"toConsumer": "Consumer whose backend gets them; their topics if empty"}
        fields |= {"maxRedrives": "Keep back those that were redriven so often; 5 if empty"}
    path = f"{_path(topic)}/{kind}"
    ask = dry_run(view, "POST", path, lambda found: run_text(kind, found), "dryRun")

    async def preview(body: Mapping[str, Any]) -> str:
        return await ask({"reason": "preview", **body})

    def shape(given: dict[str, str]) -> Mapping[str, Any]:
        body: dict[str, Any] = {**select(), **given}
        try:
            body |= {name: make(given[name]) for name, make in (("rate", float), ("maxRedrives", int)) if name in given}
        except ValueError:
            raise ValueError("rate and number of redrives are numbers") from None
        return body

    return Action(
        f"{kind.capitalize()} dead letters of {topic}",
        "POST",
        path,
        fields=fields,
        shape=shape,
        reason="required" if kind == "drop" else "optional",
        preview=preview,
        outcome=lambda job: f"job {job['id']} is {job['state']}: the table of jobs shows its progress",
    )


def run_text(kind: str, found: Mapping[str, Any]) -> str:
    """Return what a run would do, in lines."""
    would = {"redrive": "would go back", "quarantine": "would be moved", "drop": "would be dropped"}[kind]
    targets = ", ".join(f"{number(count)} to {name}" for name, count in found["targets"].items())
    lines = [f"{number(found['records'])} dead letters {would}" + (f": {targets}" if targets else "")]
    for title, part in (("error", "errors"), ("hour", "hours")):
        lines += [f"  {title} {name}: {number(count)}" for name, count in found[part].items()]
    lines += [f"{number(found['keptBack'])} kept back: redriven too often"] if found["keptBack"] else []
    lines += [f"left: {number(count)}, {why}" for why, count in found["unproved"].items()]
    return "\n".join([*lines, *(f"left: {line}" for line in found["tooLarge"])])


class TopicJobs:
    """The runs over a dead letter topic, which can be paused, resumed and stopped."""

    def __init__(self, view: View, topic: str) -> None:
        self._view = view
        self._topic = topic
        self._kinds: dict[str, str] = {}
        self._finished: set[str] | None = None
        columns = [TableColumn("id", "Job"), TableColumn("what", "What"), TableColumn("state", "State", "state")]
        columns += [TableColumn("progress", "Progress"), TableColumn("by", "By"), TableColumn("message", "Remark")]
        buttons = {verb: self._press(verb) for verb in ("Pause", "Resume", "Stop")}
        refusal = view.session.problem_with("admin")
        self._table = Table("Jobs", columns, empty="no job", buttons=buttons, refusal=refusal)

    def show(self, found: Mapping[str, Any]) -> None:
        """Show the jobs of the topic; when one has ended, the dead letters are requested again."""
        mine = [one for one in found["jobs"] if one["kind"] in KINDS and topic_of(one) == self._topic]
        self._kinds = {one["id"]: one["kind"] for one in mine}
        self._table.show(map(job_row, mine))
        finished = {one["id"] for one in mine if one["state"] not in _BUTTONS}
        if self._finished is not None and finished - self._finished:
            background_tasks.create(self._view.refresh(), name="dead letters after a job")
        self._finished = finished

    def _press(self, verb: str) -> Callable[[str], None]:
        def change(key: str) -> None:
            path = f"{JOBS}/{quote(key, safe='')}/{verb.lower()}"
            confirm(self._view, Action(f"{verb} {self._kinds[key]} {key}", "POST", path, reason=""))

        return change


def job_row(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a job over dead letters."""
    progress = one["progress"]
    done, total = progress.get("done", 0), progress.get("total")
    return {
        "id": one["id"],
        "what": one["kind"],
        "state": one["state"],
        "progress": f"{number(done)} of {number(total)}" if total is not None else number(done),
        "by": f"{one['by']}, {one['since']}",
        "message": one["message"],
        "_level": _STATES.get(one["state"], "warn"),
        "_buttons": _BUTTONS.get(one["state"], []),
    }


def topic_of(job: Mapping[str, Any]) -> str:
    """Return the topic that a job reads."""
    spec = job["spec"]
    return str(spec.get("topic") or spec.get("window", {}).get("topic", ""))


def _path(topic: str) -> str:
    return f"{DEAD_LETTERS}/{quote(topic, safe='')}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
