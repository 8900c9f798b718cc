"""What is polled from the API: one poll per session and path, only while a visible page shows it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from nicegui import Client, background_tasks

from headrace_console.server_api import ApiProblem, Servers
from headrace_console.sessions import Session, Sessions

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 2.0
_MOST_POINTS: Final = 60
_MOST_SERIES: Final = 1_000
_FORGET_SECONDS: Final = 120.0
_FIRST_SECONDS: Final = 1.0
Show = Callable[[Any], object]


class Subscriber:
    """One part of one open page."""

    def __init__(self, client: Client, show: Show, problem: Show) -> None:
        self.client = client
        self.visible = True
        self._show = show
        self._problem = problem

    @property
    def watching(self) -> bool:
        """Whether its page is open and visible."""
        return self.visible and not self.client.is_deleted

    def deliver(self, value: Any, problem: ApiProblem | None) -> None:
        """Show a value, or the problem that there is none. An equal value is shown as well: a rate has become 0."""
        if self.client.is_deleted:
            return
        with self.client:
            if problem:
                self._problem(problem)
            else:
                self._show(value)


class Feed:
    """The poll of one path for one session."""

    def __init__(self, servers: Servers, sessions: Sessions, session: Session, path: str, seconds: float) -> None:
        # Settings.
        self._servers = servers
        self._sessions = sessions
        self._session = session
        self._path = path
        self._seconds = seconds
        # The last response.
        self._task: asyncio.Task[None] | None = None
        self.value: Any = None
        self.problem: ApiProblem | None = None
        self.subscribers: list[Subscriber] = []
        self.polled_at = 0.0
        """Monotonic; 0 before the first response."""
        self._first = asyncio.Event()

    async def add(self, subscriber: Subscriber) -> None:
        """Show the feed in a page; waits a moment for the first value."""
        self.subscribers.append(subscriber)
        self.wake()
        if time.monotonic() - self.polled_at > 2 * self._seconds:
            self._first.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), _FIRST_SECONDS)
        if self.polled_at:
            subscriber.deliver(self.value, self.problem)

    def wake(self) -> None:
        """Poll if a visible page shows it and nothing polls."""
        if self._task is None or self._task.done():
            self._task = background_tasks.create(self._poll(), name=f"poll {self._path}")

    async def _poll(self) -> None:
        while self._watched():
            begun = time.monotonic()
            await self.refresh()
            await asyncio.sleep(max(0.1, self._seconds - (time.monotonic() - begun)))

    async def refresh(self) -> None:
        """Ask now and show the result."""
        try:
            if not self._sessions.alive(self._session):
                raise ApiProblem("the session has ended: log in again", 401)
            # Readiness is a report with both of its statuses; elsewhere 503 is an error.
            expected = (503,) if self._path.startswith("/health/") else ()
            reply = await self._servers.send(self._session, "GET", self._path, expected=expected)
            self.value, self.problem = reply.body, None
        except ApiProblem as problem:
            self.problem = problem
        self.polled_at = time.monotonic()
        self._first.set()
        for subscriber in [*self.subscribers]:
            try:
                subscriber.deliver(self.value, self.problem)
            except Exception:  # boundary: what one part of a page cannot show must not end the polls of all
                log.exception("%s: its response cannot be shown", self._path)

    def _watched(self) -> bool:
        self.subscribers = [one for one in self.subscribers if not one.client.is_deleted]
        return any(one.watching for one in self.subscribers)


class Feeds:
    """All polls of the console."""

    def __init__(self, servers: Servers, sessions: Sessions) -> None:
        self._servers = servers
        self._sessions = sessions
        self._feeds: dict[tuple[Session, str], Feed] = {}

    def of(self, session: Session, path: str, seconds: float) -> Feed:
        """Return the feed of a path; those that no page has shown for a while are forgotten."""
        last = time.monotonic() - _FORGET_SECONDS
        for key, feed in [*self._feeds.items()]:
            if not feed.subscribers and feed.polled_at < last:
                del self._feeds[key]
        return self._feeds.setdefault((session, path), Feed(self._servers, self._sessions, session, path, seconds))


class History:
    """The last values of numbers by name, for small plots: a bounded number of them, each with a bounded length."""

    def __init__(self) -> None:
        self._series: dict[str, deque[tuple[float, float]]] = {}

    def add(self, name: str, value: float) -> None:
        """Add a value of now; values that come faster than a poll are dropped."""
        if name not in self._series and len(self._series) >= _MOST_SERIES:
            return
        points = self._series.setdefault(name, deque(maxlen=_MOST_POINTS))
        now = time.monotonic()
        if not points or now - points[-1][0] > PERIOD_SECONDS / 2:
            points.append((now, value))

    def values(self, name: str) -> list[float]:
        """Return the values of a number, oldest first."""
        return [value for _, value in self._series.get(name, ())]

    def rates(self, name: str) -> list[float]:
        """Return how much a counter grew per second between its values; a restart of its process counts as 0."""
        points = [*self._series.get(name, ())]
        return [max(0.0, (value - before) / (at - then)) for (then, before), (at, value) in itertools.pairwise(points)]
