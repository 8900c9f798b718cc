"""The frame of every page: header, navigation, the banner of an outage, light and dark."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Final

from nicegui import ui

from headrace_console.parts import text_in
from headrace_console.server_api import UNREACHABLE_STATUS, ApiProblem
from headrace_console.view import PAGES, Page, View

READINESS: Final = "/health/readiness"
_STYLE: Final = Path(__file__).with_name("console.css").read_text()
# A page whose tab is hidden is not polled. The text is fixed, so there is nothing foreign in it.
_VISIBILITY: Final = """<script>document.addEventListener("visibilitychange",
() => emitEvent("headrace-visible", !document.hidden));</script>"""
_NEXT: Final = {None: True, True: False, False: None}
_COLOURS: Final = {None: ("Colours: system", "brightness_auto"), True: ("Colours: dark", "dark_mode")}


async def build(page: Page, view: View) -> None:
    """Build a page within its frame."""
    ui.add_css(_STYLE)
    ui.colors(primary="#0b57d0")
    ui.add_body_html(_VISIBILITY)
    ui.on("headrace-visible", lambda event: view.set_visible(bool(event.args)))
    drawer = _navigation(page)
    _header(view, drawer)
    banner = ui.label().classes("hr-banner")
    banner.props.update({"role": "status", "aria-live": "polite"})
    text_in("h1", page.title)

    def reachable(_: Any) -> None:
        banner.set_text("")

    def unreachable(problem: ApiProblem) -> None:
        since = view.servers.outage_since
        if problem.status == UNREACHABLE_STATUS and since:
            banner.set_text(f"Since {datetime.fromtimestamp(since).astimezone():%H:%M:%S}: {problem}")
        elif problem.status == 401:
            ui.navigate.to("/login")
        else:
            banner.set_text(str(problem))

    await view.follow(READINESS, reachable, problem=unreachable)
    await page.build(view)


def _navigation(present: Page) -> ui.left_drawer:
    with ui.left_drawer(bordered=True).props("breakpoint=800 width=190") as drawer, ui.element("nav") as nav:
        nav.props["aria-label"] = "Pages"
        with ui.element("ul").classes("hr-pages"):
            for page in sorted((one for one in PAGES if one.position), key=lambda one: one.position or 0):
                with ui.element("li"):
                    link = ui.link(page.title, page.path)
                    if page is present:
                        link.props["aria-current"] = "page"
    return drawer


def _header(view: View, drawer: ui.left_drawer) -> None:
    dark = ui.dark_mode(view.session.dark)

    def turn() -> None:
        dark.value = view.session.dark = _NEXT[dark.value]
        draw()

    def draw() -> None:
        label, icon = _COLOURS.get(dark.value, ("Colours: light", "light_mode"))
        colours.props["aria-label"] = colours.props["title"] = label
        colours.set_icon(icon)

    with ui.header().classes("hr-header"):
        menu = ui.button(icon="menu", on_click=drawer.toggle).props("flat dense color=white")
        menu.props["aria-label"] = "Show or hide the navigation"
        ui.link("Headrace", "/").classes("hr-name")
        ui.label(f"connected to {view.servers.url}").classes("hr-server")
        colours = ui.button(on_click=turn).props("flat dense color=white")
        draw()
        if view.session.token:
            with ui.element("form").props('method="post" action="/logout"'), ui.element("button") as leave:
                leave.props["type"] = "submit"
                ui.label("Log out")
