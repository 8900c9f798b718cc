"""Jobs: replays and what is done with dead letters, with their progress."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from headrace_console.actions import Action, confirm
from headrace_console.parts import ago, number
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

JOBS: Final = "/adm/jobs"
_COLUMNS: Final = (
    TableColumn("id", "Job"),
    TableColumn("kind", "Kind"),
    TableColumn("topic", "Topic"),
    TableColumn("state", "State", "state"),
    TableColumn("done", "Done", "number"),
    TableColumn("counts", "Records"),
    TableColumn("by", "Started by"),
    TableColumn("owner", "Process"),
    TableColumn("why", "Why"),
)
_LEVELS: Final = {"failed": "bad", "paused": "warn", "waiting": "warn", "stopped": "warn"}
_BUTTONS: Final = {"running": ["Pause", "Stop"], "waiting": ["Pause", "Stop"], "paused": ["Resume", "Stop"]}


@page("/jobs", "Jobs", position=60)
async def jobs(view: View) -> None:
    """Build the page."""

    def change(verb: str, job: str) -> None:
        path = f"{JOBS}/{quote(job, safe='')}/{verb.lower()}"
        confirm(view, Action(f"{verb} {job}", "POST", path, reason=""))

    table = Table(
        "Jobs",
        _COLUMNS,
        empty="no job: a replay or a redrive starts one",
        buttons={verb: functools.partial(change, verb) for verb in ("Pause", "Resume", "Stop")},
        refusal=view.session.problem_with("admin"),
    )
    await view.follow(JOBS, lambda found: table.show(map(row_of, found["jobs"])))


def row_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a job."""
    progress, spec = one["progress"], one["spec"]
    done, total = progress.get("done"), progress.get("total")
    share = f" ({100 * done // total} %)" if done is not None and total else ""
    counts = progress.get("counts") or {
        name: value for name, value in progress.items() if name not in ("done", "total") and isinstance(value, int)
    }
    desired = f"{one['desired']} by {one['desiredBy']}" if one["desiredBy"] else ""
    window = spec.get("window")
    topic = spec.get("topic") or (window.get("topic") if isinstance(window, Mapping) else "")
    return {
        "id": one["id"],
        "kind": one["kind"],
        "topic": topic or "",
        "state": one["state"],
        "done": "-" if done is None else f"{number(done)} of {number(total)}{share}",
        "counts": ", ".join(f"{number(value)} {name}" for name, value in counts.items() if value),
        "by": f"{one['by']}, {ago(one['since'])} ago",
        "owner": one["owner"],
        "why": one["message"] or desired,
        "_level": _LEVELS.get(one["state"], "ok"),
        "_buttons": _BUTTONS.get(one["state"], []),
    }
