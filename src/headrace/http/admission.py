"""A request of a known caller while it is served: it counts for the caller, and ends when its credentials do."""

import asyncio
from types import TracebackType
from typing import Final

from headrace.http.asgi import WAKE, Message, Receive, Scope, headers_of
from headrace.http.auth import Authenticator, Principal

_SOON_SECONDS: Final = 0.05
"""Least time to the next judgement, because clocks differ a little."""
_MOST_SECONDS: Final = 1e8


class Admission:
    """Counts a request, and judges its credentials again after a change of the principals and when they expire.

    Requests that only compute and respond are not disturbed; one that waits for its client in `receive` ends.
    """

    def __init__(self, authenticator: Authenticator, principal: Principal, scope: Scope, receive: Receive) -> None:
        self._authenticator = authenticator
        self._principal = principal
        self._scope = scope
        self._receive = receive
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Admission":
        self._authenticator.in_flight.enter(self._principal.name)
        self._authenticator.judged_again.add(self.judge_again)
        self._set_timer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._authenticator.judged_again.discard(self.judge_again)
        self._authenticator.in_flight.leave(self._principal.name)

    def judge_again(self) -> None:
        """Judge the credentials again at the next message, and cause one."""
        self._is_due = True
        if wake := self._scope["state"].get(WAKE):
            wake()

    async def receive(self) -> Message:
        """Return the next message of the request.

        Raises:
            Unauthenticated, AuthTokenScopeMismatch: The credentials are not valid any more, or have other scopes.
        """
        message = await self._receive()
        if self._is_due:
            self._is_due = False
            certificate = self._scope["state"].get("certificate")
            await self._authenticator.confirm(self._principal, headers_of(self._scope), certificate)
            self._set_timer()
        return message

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        seconds = self._authenticator.remaining_seconds(self._principal)
        if seconds < _MOST_SECONDS:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, _SOON_SECONDS), self.judge_again)
