"""One open page: what it may ask, follow and do; and the list of pages."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from nicegui import Client, ui

from headrace_console.feeds import PERIOD_SECONDS, Feeds, History, Show, Subscriber
from headrace_console.server_api import REQUEST_SECONDS, UNREACHABLE_STATUS, ApiProblem, ApiReply, Servers
from headrace_console.sessions import Session

Build = Callable[["View"], Awaitable[None]]


class Page(NamedTuple):
    """A page: its path, its title, what builds it, and its position in the navigation; None if it is not there."""

    path: str
    title: str
    build: Build
    position: int | None


PAGES: Final[list[Page]] = []
"""All pages."""


def page(path: str, title: str, *, position: int | None = None) -> Callable[[Build], Build]:
    """Make a function a page; it is called with the view. `view.query` has the query."""

    def add(build: Build) -> Build:
        PAGES.append(Page(path, title, build, position))
        return build

    return add


class View:
    """One open page of one session."""

    def __init__(self, client: Client, session: Session, servers: Servers, feeds: Feeds, history: History) -> None:
        """Make the view of a client; nothing is requested yet."""
        self.client = client
        self.session = session
        self.servers = servers
        self.history = history
        self.query: Mapping[str, str] = client.request.query_params
        """The query of the page's address; foreign."""
        self._feeds = feeds
        self.visible = True
        """Whether its tab is."""
        self._followed: list[tuple[Subscriber, str, float]] = []

    async def follow(
        self,
        path: str,
        show: Show,
        *,
        seconds: float = PERIOD_SECONDS,
        optional: bool = False,
        problem: Show | None = None,
    ) -> None:
        """Poll a path of the API while this page is visible, and call `show` with each response that differs.

        Args:
            path: Path and query of a GET.
            show: Called inside this page.
            seconds: Pause between requests; pages that follow the same path share them.
            optional: Whether a refusal is left out of the page, as where the process has no such part.
            problem: Called with each problem instead of showing its sentence here.
        """
        with ui.element("div") as notice:
            note = ui.label().classes("hr-problem")
            note.props["role"] = "status"
        notice.set_visibility(False)

        def good(value: Any) -> None:
            notice.set_visibility(False)
            shown = show(value)
            assert not inspect.isawaitable(shown), "what shows a response must not wait"

        def bad(found: ApiProblem) -> None:
            if found.status == 401:
                ui.navigate.to("/login")
            notice.set_visibility(not optional and found.status != UNREACHABLE_STATUS)
            note.set_text(str(found))

        subscriber = Subscriber(self.client, good, problem or bad)
        self._followed.append((subscriber, path, seconds))
        await self._feeds.of(self.session, path, seconds).add(subscriber)

    async def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """Ask once, and return the JSON; raises as `send`."""
        return (await self.send("GET", path, query=query)).body

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        *,
        seconds: float = REQUEST_SECONDS,
    ) -> ApiReply:
        """Send a request with the rights of the user; `seconds` limits how long it takes.

        Raises:
            ApiProblem: It was refused, or no process responds. The text is for people.
        """
        self.session.touch()
        return await self.servers.send(self.session, method, path, body, query, seconds=seconds)

    async def refresh(self) -> None:
        """Ask again now for everything that the page follows, as after an action."""
        for _, path, seconds in self._followed:
            await self._feeds.of(self.session, path, seconds).refresh()

    def set_visible(self, visible: bool) -> None:
        """Poll, or do not, as the tab is visible or hidden."""
        self.visible = visible
        for subscriber, path, seconds in self._followed:
            subscriber.visible = visible
            if visible:
                self._feeds.of(self.session, path, seconds).wake()
