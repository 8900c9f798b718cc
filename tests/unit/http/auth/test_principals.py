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
from headrace.testing import ManualClock

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


def test_one_scope_of_several_is_enough() -> None:
    """Patterns say nothing of endpoints without topic or group."""
    Principal("p", frozenset({"metrics", "produce:x"})).require(("admin", "metrics"))
    with pytest.raises(AuthTokenScopeMismatch):
        Principal("p", frozenset({"produce:x"})).require(("admin", "metrics"))


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


async def test_wrong_tokens_in_a_row_are_slowed() -> None:
    """The first ten are answered at once, then one each 0.1 s; who sends many at once waits 2 s and is told 429."""
    clock = ManualClock()
    delay = FailureDelay(clock)
    assert [delay.count("a") for _ in range(10)] == pytest.approx([0.0] * 10)
    for _ in range(30):
        seconds = delay.count("a")
        assert seconds == pytest.approx(0.1)
        await clock.advance(seconds)
    waits = [delay.count("a") for _ in range(100)]
    assert waits[10] == pytest.approx(1.1)
    assert max(waits) == pytest.approx(FailureDelay.MOST_SECONDS + 0.1)
    assert delay.applies("a")
    assert not delay.applies("b")
    assert delay.count("b") == 0.0
    await clock.advance(60)
    assert not delay.applies("a")
    for _ in range(20):
        delay.count("a")
    for number in range(10_000):
        delay.count(str(number))
    assert not delay.applies("a")  # of 10,001 keys, the oldest is forgotten
