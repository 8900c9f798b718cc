"""A request of a known caller while it is served: it ends when the caller's credentials do."""

import asyncio
from types import TracebackType
from typing import Final

from headrace.http.auth import Authenticator, Principal
from headrace.http.request import HttpRequest

_SOON_SECONDS: Final = 0.05
"""Least time to the next judgement, because clocks differ a little."""
_MOST_SECONDS: Final = 1e8


class Admission:
    """Judges the credentials of a request again after a change of the principals and when they expire.

    Requests that only compute and respond are not disturbed; one that waits for its client ends.
    """

    def __init__(self, authenticator: Authenticator, principal: Principal, request: HttpRequest) -> None:
        self._authenticator = authenticator
        self._principal = principal
        self._request = request
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Admission":
        self._authenticator.judged_again.add(self.judge_again)
        self._set_timer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._authenticator.judged_again.discard(self.judge_again)

    def judge_again(self) -> None:
        """Judge the credentials again when the endpoint waits for its client, and wake it."""
        self._request.body.judge = self._judge
        self._request.response.wake()

    async def _judge(self) -> None:
        """Return if the credentials are still valid.

        Raises:
            Unauthenticated, AuthTokenScopeMismatch: They are not, or have other scopes.
        """
        self._request.body.judge = None
        await self._authenticator.confirm(self._principal, self._request.head.headers, self._request.certificate)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        seconds = self._authenticator.remaining_seconds(self._principal)
        if seconds < _MOST_SECONDS:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, _SOON_SECONDS), self.judge_again)
