"""What scopes and patterns allow (decisions.md 19), and how often a caller may come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from headrace.config.http import SecurityConfig
from headrace.errors import AuthTokenExpired, AuthTokenScopeMismatch, TooManyRequests
from headrace.http.auth import Authenticator, Principal, RateLimit
from headrace.http.auth.rate_limit import FailureDelay
from headrace_devkit.testing import ManualClock

WRITE = ("kafka:w",)


@pytest.mark.parametrize(
    ("scopes", "name", "missing"), yaml.safe_load(Path(__file__).with_name("scopes.yaml").read_text())
)
def test_scopes_and_patterns(scopes: str, name: str | None, missing: str) -> None:
    """Scopes allow all but internal names; with any pattern, patterns alone decide; the error names what is missing."""
    principal = Principal("p", frozenset(scopes.split()))
    if not missing:
        principal.require(WRITE, "produce", name)
        return
    with pytest.raises(AuthTokenScopeMismatch) as caught:
        principal.require(WRITE, "produce", name)
    assert caught.value.parameters == {"scope": missing}
    assert caught.value.description == f"missing scope {missing}"


def test_the_rate_limit_remembers_a_bounded_number_of_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket of the caller that came longest ago is forgotten, and begins full."""
    monkeypatch.setattr("headrace.http.auth.rate_limit._MAX_KEYS", 3)
    limit = RateLimit(1, ManualClock())
    for number in range(4):
        limit.take(str(number))
    limit.take("0")
    with pytest.raises(TooManyRequests):
        limit.take("3")


def test_a_certificate_is_good_until_its_end() -> None:
    """Row J2: a connection that outlives it is refused what it asks after that."""
    clock = ManualClock(1_700_000_000)
    principals = {"loader": {"scopes": ["kafka:w"]}}
    authenticator = Authenticator(SecurityConfig.model_validate({"mode": "mtls", "principals": principals}), clock)
    certificate = {"subject": ((("commonName", "loader"),),), "notAfter": "Nov 14 22:13:30 2023 GMT"}
    principal = asyncio.run(authenticator.identify({}, certificate, ""))
    assert (principal.scopes, principal.expires_at) == ({"kafka:w"}, 1_700_000_010)
    asyncio.run(clock.advance(11))
    with pytest.raises(AuthTokenExpired):
        asyncio.run(authenticator.identify({}, certificate, ""))


async def test_wrong_tokens_slow_their_caller_for_a_minute() -> None:
    """Of 10,001 callers, the one that came longest ago is forgotten."""
    clock = ManualClock()
    delay = FailureDelay(clock)
    for _ in range(20):
        delay.count("a")
    assert (delay.applies("a"), delay.applies("b"), delay.count("b")) == (True, False, 0.0)
    await clock.advance(60)
    assert not delay.applies("a")
    for _ in range(20):
        delay.count("a")
    for number in range(10_000):
        delay.count(str(number))
    assert not delay.applies("a")
