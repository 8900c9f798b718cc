"""Who uses the console: tokens are kept in the memory of this process only, behind a random cookie."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from typing import Final

_MOST_SESSIONS: Final = 100
_IDLE_SECONDS: Final = 1800.0
_MOST_REQUESTS: Final = 30


class Session:
    """One login. `token` is empty where the API needs none."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.used_at = time.monotonic()
        self.turns = asyncio.Semaphore(_MOST_REQUESTS)
        """Requests to the API that this login may have at a time, so that others have connections left."""
        self.dark: bool | None = None
        """Which colours the user has chosen; None for those of the system."""
        self.refused: dict[str, str] = {}
        """Scopes that the server has found missing, with its sentence."""
        self._scopes = _scopes_of(token)

    def touch(self) -> None:
        """Count as used now."""
        self.used_at = time.monotonic()

    def problem_with(self, *scopes: str) -> str:
        """Return why an action that needs one of these scopes is not possible; empty if it may be.

        This only disables buttons. The server decides.
        """
        if self._scopes is not None and not self._scopes & {*scopes}:
            return f"your token has no scope {' or '.join(scopes)}"
        return next((self.refused[scope] for scope in scopes if scope in self.refused), "")


class Sessions:
    """Sessions by cookie: a bounded number, which end when idle."""

    def __init__(self, shared_token: str = "") -> None:
        """Start without sessions; `shared_token` is what callers without a login use."""
        self.shared = Session(shared_token)
        self._sessions: dict[str, Session] = {}

    def open(self, token: str) -> str:
        """Start a session and return its cookie; the session unused for longest ends if there are too many."""
        self._drop_idle()
        if len(self._sessions) >= _MOST_SESSIONS:
            self.end(min(self._sessions, key=lambda one: self._sessions[one].used_at))
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = Session(token)
        return cookie

    def find(self, cookie: str) -> Session:
        """Return the session of a cookie, or the one of callers without a login."""
        self._drop_idle()
        session = self._sessions.get(cookie, self.shared)
        session.touch()
        return session

    def alive(self, session: Session) -> bool:
        """Return whether a session has not ended."""
        return session is self.shared or session in self._sessions.values()

    def end(self, cookie: str) -> None:
        """End a session, if there is one."""
        if session := self._sessions.pop(cookie, None):
            session.token = ""  # open pages still have it

    def _drop_idle(self) -> None:
        last = time.monotonic() - _IDLE_SECONDS
        for cookie in [cookie for cookie, one in self._sessions.items() if one.used_at < last]:
            self.end(cookie)


def _scopes_of(token: str) -> frozenset[str] | None:
    """Return the scopes that a signed token names, unverified; None if it does not say, as a fixed token."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        named = claims.get("scope", claims.get("scp"))
        return frozenset(named.split() if isinstance(named, str) else named)
    except (ValueError, IndexError, AttributeError, TypeError):
        return None
