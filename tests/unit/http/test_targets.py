"""What a target tells of its request: as the endpoints of its own listener declare it, and no other list."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.app.documents import every_endpoint
from headrace.http.endpoint import OPEN, Endpoint, Rule, ServedEndpoint
from headrace.http.targets import Targets

DIRECT: Any = object()
PRODUCE = Endpoint("POST", "/records/{topic}", "produce", "", Rule((), "produce", "topic"))
POLL = Endpoint("GET", "/shops/{group}/tills/{till}/next.one", "poll", "", OPEN, long_poll=True)
FEED = Endpoint("GET", "/shops/feed", "feed", "", OPEN, long_poll=True)
OTHER = Endpoint("GET", "/shops/{group}", "other", "", OPEN)


def targets(*endpoints: Endpoint, direct: tuple[Endpoint, ...] = ()) -> Targets:
    return Targets([ServedEndpoint(one, DIRECT, DIRECT if one in direct else None) for one in endpoints])


@pytest.mark.parametrize(
    ("target", "waits"),
    [
        (b"/shops/a/tills/b/next.one", True),
        (b"/shops/a/tills/b/next.one?timeout=1", True),
        (b"/%73hops/a%20b/tills/%ff/next%2Eone", True),
        (b"http://h/shops/a/tills/b/next.one?x", True),
        (b"//h/shops/feed", True),
        (b"/shops/feed", True),
        (b"/shops/a%2fb/tills/b/next.one", False),  # decoded, it has one segment more
        (b"/shops/a/tills/b/next1one", False),
        (b"/shops/a", False),
        (b"/x?/shops/feed", False),
        (b"*", False),
    ],
)
def test_a_long_poll_is_known_by_its_target(target: bytes, waits: bool) -> None:
    """Also in absolute form and with percent-encoding; and only on the listener that has the endpoint."""
    assert targets(PRODUCE, POLL, FEED, OTHER).is_long_poll(target) is waits
    assert not targets(PRODUCE, OTHER).is_long_poll(target)
    assert not targets().is_long_poll(target)


def test_beginnings_of_direct_endpoints_are_never_those_of_a_long_poll() -> None:
    """The connection does not look further at them."""
    assert targets(PRODUCE, POLL, OTHER, direct=(PRODUCE,)).direct == (b"/records/",)
    assert targets(PRODUCE, POLL, OTHER, direct=(OTHER,)).direct == ()
    catch_all = Endpoint("POST", "/{topic}", "all", "", OPEN)
    assert targets(catch_all, FEED, direct=(catch_all,)).direct == ()
    assert targets(catch_all, direct=(catch_all,)).direct == (b"/",)


def test_what_active_consumers_declare() -> None:
    """Reads wait; and every operation on an instance is served by the process that has it."""
    reads = ["/consumers/{group}/instances/{instance}/records", "/consumers/deadLetter/active"]
    assert sorted(one.path for one in every_endpoint() if one.long_poll) == sorted(reads)
    for one in every_endpoint():
        assert one.affinity == (("group", "instance") if "instance" in one.parameters else ()), one.path
