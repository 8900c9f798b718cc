"""What changes something: a dialog with a preview and a reason, then the request, then its result."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from nicegui import ui

from headrace_console.audit_reads import event_of
from headrace_console.parts import heading, visible
from headrace_console.server_api import ApiProblem, ApiReply
from headrace_console.view import View

log = logging.getLogger(__name__)

_DRY_RUN_SECONDS: Final = 70.0
_UNEXPECTED: Final = (
    "this console does not understand the response of Headrace: both need the same version; its log has more"
)
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
    multiline: Collection[str] = ()
    """Fields of several lines; what is in them is sent as it is."""
    outcome: Callable[[Any], str] | None = None
    """Says in lines what the response reports, such as the job that was started."""
    listed: bool = False
    """Whether the API takes a list of changes; this sends a list of one."""
    names: Sequence[str] = ()
    """The whole body where the API takes a list of names."""


def dry_run(view: View, method: str, path: str, text: Callable[[Any], str], flag: str = "dry_run") -> Preview:
    """Return a preview by the dry run of the API: the same request with a flag, and its response in lines."""

    async def preview(body: Mapping[str, Any]) -> str:
        return text((await view.send(method, path, {**body, flag: True}, seconds=_DRY_RUN_SECONDS)).body)

    return preview


def action_button(view: View, label: str, action: Action) -> ui.button:
    """Show a button for an action; it is disabled, with the reason, where the user may not do it."""
    button = ui.button(label, on_click=lambda: confirm(view, action), color=None).props("outline no-caps dense")
    button.classes("hr-button")
    if problem := view.session.problem_with(*action.scopes):
        button.disable()
        button.props["title"] = problem
    return button


def action_row(view: View, actions: Mapping[str, Action]) -> None:
    """Show a row of buttons, by their labels."""
    with ui.row():
        for label, action in actions.items():
            action_button(view, label, action)


def confirm(view: View, action: Action) -> None:
    """Open the dialog of an action."""
    with view.client, ui.dialog(value=True) as dialog, ui.card().classes("hr-dialog") as card:
        card.props["aria-label"] = action.title
        heading(action.title)
        form = _Form(view, action)
        with ui.row():
            if action.preview:
                ui.button("Preview", on_click=form.preview, color=None).props("outline no-caps").classes("hr-button")
            form.confirming = ui.button(action.title.split()[0], on_click=form.run).props("no-caps")
            form.closing = ui.button("Cancel", on_click=dialog.close, color=None).props("flat no-caps")
        if action.preview and not action.fields:
            ui.timer(0, form.preview, once=True)
    dialog.on("hide", dialog.delete)


class _Form:
    """The fields of an action in its dialog, and what is shown of its outcome."""

    confirming: ui.button
    closing: ui.button

    def __init__(self, view: View, action: Action) -> None:
        self._view = view
        self._action = action
        self._inputs = {
            name: ui.textarea(label) if name in action.multiline else ui.input(label)
            for name, label in action.fields.items()
        }
        self._reason = ui.input("Reason, for the audit") if action.reason else None
        with ui.element("pre").classes("hr-result") as result:
            self._result = ui.label()
        result.props.update({"aria-live": "polite", "tabindex": "0"})

    async def preview(self) -> None:
        """Show what would happen."""
        text = await preview_text(self._action, self._body)
        if self.confirming.enabled:  # else a slow preview would hide what was done
            self._report(text)

    async def run(self) -> None:
        """Do it and show the outcome."""
        try:
            body = self._body()
            if self._action.reason == "required" and not body.get("reason"):
                raise ValueError("a reason is needed: the audit keeps it")
        except ValueError as problem:
            self._report(str(problem))
            return
        self.confirming.disable()
        text, correlation_id = await run_action(self._view, self._action, body)
        self._report(text)
        self.closing.set_text("Close")
        await self._view.refresh()
        if correlation_id and (event := await event_of(self._view, correlation_id)):
            self._report("\n".join([f"Audit: {event}; correlation id {correlation_id}", *text.split("\n")[1:]]))

    def _report(self, text: str) -> None:
        if not self._result.is_deleted:  # the user has closed the dialog
            self._result.set_text(visible(text))

    def _body(self) -> dict[str, Any]:
        action, reason = self._action, self._reason
        fields = {
            name: one.value if name in action.multiline else one.value.strip()
            for name, one in self._inputs.items()
            if one.value
        }
        given = action.shape(fields)
        return {**action.body, **given, **({"reason": reason.value} if reason and reason.value else {})}


async def preview_text(action: Action, body: Callable[[], Mapping[str, Any]]) -> str:
    """Return what would happen, or why that is not known; `body` returns the body of the request."""
    assert action.preview
    try:
        return await action.preview(body())
    except (ApiProblem, ValueError) as problem:
        return str(problem)
    except Exception:  # boundary: the dialog says that a response cannot be shown
        log.exception("%s: its preview cannot be shown", action.title)
        return _UNEXPECTED


async def run_action(view: View, action: Action, body: Mapping[str, Any]) -> tuple[str, str]:
    """Send the request, and return what was done, and its correlation id; or the sentence of the error, and nothing."""
    given: Any = [body] if action.listed else action.names or body
    sent = None if action.method == "DELETE" else given
    try:
        reply = await view.send(action.method, action.path, sent, action.query)
    except ApiProblem as problem:
        if problem.status == 403:
            view.session.refused.setdefault(action.scopes[0], str(problem))
        return f"Not done: {problem}", ""
    return _line(action, body, reply), reply.correlation_id


def _line(action: Action, body: Mapping[str, Any], reply: ApiReply) -> str:
    waits = reply.status == 202 and not action.outcome
    pending = " - waits for the process that has the partition" if waits else ""
    found = reply.body.get("results") if isinstance(reply.body, dict) else None
    outcomes = [_outcome(action.outcome, action.title, reply.body)] if action.outcome else []
    outcomes += [", ".join(f"{name} {value}" for name, value in one.items() if value != "") for one in found or ()]
    why = f", reason: {body['reason']}" if body.get("reason") else ""
    head = f"Audit: {datetime.now().astimezone():%H:%M:%S} {action.title}{why}{pending}; correlation id "
    return "\n".join([head + reply.correlation_id, *outcomes])


def _outcome(text: Callable[[Any], str], title: str, body: Any) -> str:
    try:
        return text(body)
    except Exception:  # boundary: the dialog says that it was done, even if its response cannot be shown
        log.exception("%s: its response cannot be shown", title)
        return _UNEXPECTED
