"""What changes something: a dialog with a preview and a reason, then the request, then what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from nicegui import ui

from headrace.console.parts import heading, text_in
from headrace.console.server_api import ApiProblem, Reply
from headrace.console.view import View

Preview = Callable[[Mapping[str, Any]], Awaitable[str]]


class Action(NamedTuple):
    """A request that changes something."""

    title: str
    """What is done to what: `Pause orders`."""
    method: str
    path: str
    body: Mapping[str, Any] = {}
    fields: Mapping[str, str] = {}
    """Further fields of the body that the user fills in, with their labels."""
    shape: Callable[[dict[str, str]], Mapping[str, Any]] = dict
    """Makes the part of the body from the filled fields; a ValueError is a sentence for the user."""
    reason: str = "optional"
    """Whether the API takes a reason: `optional`, `required`, or empty if it takes none."""
    preview: Preview | None = None
    """Returns what would happen, in lines; gets the body. Where the API has a dry run, it sends that."""
    query: Mapping[str, Any] = {}
    scopes: tuple[str, ...] = ("admin",)
    """Of which one is needed."""


def action_button(view: View, label: str, action: Action) -> ui.button:
    """Show a button for an action; it is disabled, with the reason, where the user may not do it."""
    button = ui.button(label, on_click=lambda: confirm(view, action)).props("outline no-caps dense")
    if problem := view.session.problem_with(*action.scopes):
        button.disable()
        button.props["title"] = problem
    return button


def confirm(view: View, action: Action) -> None:
    """Open the dialog of an action."""
    with view.client, ui.dialog(value=True) as dialog, ui.card().classes("hr-dialog") as card:
        card.props["aria-label"] = action.title
        heading(action.title)
        inputs = {name: ui.input(label) for name, label in action.fields.items()}
        reason = ui.input("Reason, for the audit") if action.reason else None
        result = text_in("pre", "").classes("hr-result")
        result.props["aria-live"] = "polite"
        said = next(iter(result.default_slot.children))
        assert isinstance(said, ui.label)

        def body() -> dict[str, Any]:
            given = action.shape({name: one.value.strip() for name, one in inputs.items() if one.value})
            return {**action.body, **given, **({"reason": reason.value} if reason and reason.value else {})}

        async def preview() -> None:
            assert action.preview
            try:
                said.set_text(await action.preview(body()))
            except (ApiProblem, ValueError) as problem:
                said.set_text(str(problem))

        async def run() -> None:
            try:
                sent = body()
                if action.reason == "required" and not sent.get("reason"):
                    raise ValueError("a reason is needed: the audit keeps it")
            except ValueError as problem:
                said.set_text(str(problem))
                return
            doing.disable()
            said.set_text(await _run(view, action, sent))
            closing.set_text("Close")
            await view.refresh()

        with ui.row():
            if action.preview:
                ui.button("Preview", on_click=preview).props("outline no-caps")
            doing = ui.button(action.title.split()[0], on_click=run).props("no-caps")
            closing = ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
    dialog.on("hide", dialog.delete)
    if action.preview and not action.fields:
        ui.timer(0, preview, once=True)


async def _run(view: View, action: Action, body: Mapping[str, Any]) -> str:
    """Send the request, and return the line that the audit has of it, or the sentence of the error."""
    try:
        reply = await view.send(action.method, action.path, None if action.method == "DELETE" else body, action.query)
    except ApiProblem as problem:
        if problem.status == 403:
            view.session.refused.setdefault(action.scopes[0], str(problem))
        return f"Not done: {problem}"
    return _line(action, body, reply)


def _line(action: Action, body: Mapping[str, Any], reply: Reply) -> str:
    pending = " - waits for the process that has the partition" if reply.status == 202 else ""
    found = reply.body.get("results") if isinstance(reply.body, dict) else None
    outcomes = [", ".join(f"{name} {value}" for name, value in one.items() if value != "") for one in found or ()]
    why = f", reason: {body['reason']}" if body.get("reason") else ""
    head = f"Audit: {datetime.now().astimezone():%H:%M:%S} {action.title}{why}{pending}; correlation id "
    return "\n".join([head + reply.correlation_id, *outcomes])
