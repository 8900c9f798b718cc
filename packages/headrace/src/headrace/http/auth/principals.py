"""Authenticated callers, and their scopes."""

import dataclasses
import fnmatch
from collections.abc import Collection
from typing import Any, Final

from headrace.errors import AuthTokenScopeMismatch, ScopeTokenScopeMismatch

READ, WRITE, ADMIN, METRICS = "kafka:r", "kafka:w", "admin", "metrics"
SEE_OWN, CHANGE_OWN = "consumers:r", "consumers:w"
_PATTERNS = ("produce:", "consume:", "group:", "call:")


class TokenRefused(Exception):
    """The token is not valid. The reason is logged, and not in the response."""


class TokenExpired(TokenRefused):
    """The token was valid earlier."""


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    name: str
    scopes: frozenset[str]
    by_scope_token: bool = False
    """Whether the scopes are those of X-Scope-Token."""
    expires_at: float = float("inf")
    """End of the token or certificate, in seconds since the epoch; longer requests end then."""

    def require(self, any_of: Collection[str], action: str = "", name: str | None = None) -> None:
        """Return if this principal has the scope for an action.

        Args:
            any_of: Scopes of which one is sufficient, the usual one first.
            action: `produce`, `consume`, `group` or `call`, if the request names one of these. Then only patterns
                count if the principal has any (`produce:orders.*`).
            name: What the request names; None if its body names it.

        Raises:
            AuthTokenScopeMismatch, ScopeTokenScopeMismatch: A scope is missing; the error names it.
        """
        missing = self._missing(any_of, action, name)
        if missing:
            error = ScopeTokenScopeMismatch if self.by_scope_token else AuthTokenScopeMismatch
            raise error(f"missing scope {missing}", scope=missing)

    def may(self, any_of: Collection[str], action: str, name: str) -> bool:
        """Return whether `require` would return."""
        return not self._missing(any_of, action, name)

    def _missing(self, any_of: Collection[str], action: str, name: str | None) -> str:
        if name is not None and name.startswith("_") and ADMIN not in self.scopes:
            return ADMIN  # topics and groups of Kafka, the schema registry and other tools
        if not action or not any(scope.startswith(_PATTERNS) for scope in self.scopes):
            return "" if not self.scopes.isdisjoint(any_of) else next(iter(any_of))
        prefix = f"{action}:"
        patterns = [scope[len(prefix) :] for scope in self.scopes if scope.startswith(prefix)]
        if name is None:
            return "" if patterns else f"{prefix}*"
        return "" if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) else prefix + name[:249]


class RequestCaller:
    """Who sent a request, and whether it counts for that principal."""

    def __init__(
        self, principal: Principal | None = None, *, is_anonymous: bool = False, forwarded: Any = None
    ) -> None:
        # As identified
        self.principal = principal
        """None without authentication, and for unknown callers of open endpoints."""
        self.is_anonymous = is_anonymous
        """Whether authentication is on, and the caller of an open endpoint did not prove its identity."""
        self.forwarded = forwarded
        """Set if another process forwarded the request."""
        # While the request is served
        self.is_counted = False
        """Whether it counts for the rate of its caller already."""
        self.is_in_flight = False
        """Whether it counts for the requests in flight of its caller."""


ANYONE: Final = RequestCaller()
"""The caller of every request without authentication."""
