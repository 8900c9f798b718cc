"""Who calls, and which scope is missing for what they ask. Source: decisions.md 19; sidecar.md 2.8."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection

from headrace.errors import AuthTokenScopeMismatch, ScopeTokenScopeMismatch

READ, WRITE, ADMIN, METRICS = "kafka:r", "kafka:w", "admin", "metrics"
SEE_OWN, CHANGE_OWN = "consumers:r", "consumers:w"
_PATTERNS = ("produce:", "consume:", "group:")


class TokenRefused(Exception):
    """The token is not taken; the log may say why, the answer does not."""


class TokenExpired(TokenRefused):
    """It was good once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who proved who they are."""

    name: str
    scopes: frozenset[str]
    by_scope_token: bool = False
    """Whether the scopes came with X-Scope-Token."""
    expires_at: float = float("inf")
    """Until when what was shown is good, in seconds since the epoch; a request that lasts longer is to end then."""

    def require(self, any_of: Collection[str], action: str = "", name: str | None = None) -> None:
        """Return if this principal may do something.

        Args:
            any_of: Scopes of which one is enough, the usual one first.
            action: `produce`, `consume` or `group` when a topic or group is touched. Then, as soon as the principal
                has any pattern (`produce:orders.*`), patterns alone decide.
            name: The topic or group; None when it is named later, in the body.

        Raises:
            AuthTokenScopeMismatch, ScopeTokenScopeMismatch: It may not; the error names the missing scope.
        """
        missing = self._missing(any_of, action, name)
        if missing:
            error = ScopeTokenScopeMismatch if self.by_scope_token else AuthTokenScopeMismatch
            raise error(f"this needs the scope {missing}", scope=missing)

    def _missing(self, any_of: Collection[str], action: str, name: str | None) -> str:
        if name is not None and name.startswith("_") and ADMIN not in self.scopes:
            return ADMIN  # Kafka's own topics and groups, the registry's, and those of other tools
        if not action or not any(scope.startswith(_PATTERNS) for scope in self.scopes):
            return "" if not self.scopes.isdisjoint(any_of) else next(iter(any_of))
        prefix = f"{action}:"
        patterns = [scope[len(prefix) :] for scope in self.scopes if scope.startswith(prefix)]
        if name is None:
            return "" if patterns else f"{prefix}*"
        return "" if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) else prefix + name[:249]
