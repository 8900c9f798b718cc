"""The guard on statistics that were made up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.kafka.transactions.transactional_client import MOST_TRANSACTIONS, TransactionGuard

QUIET = {"req_timeouts": 0, "txretries": 0, "disconnects": 0, "req": {"Produce": 9}}


def statistics(at: float, ends: int = 0, **counters: int) -> str:
    """Return what a client would say at a time, as far as it is read."""
    coordinator: dict[str, Any] = {**QUIET, **counters, "req": {"EndTxn": ends}}
    return json.dumps(
        {"ts": int(at * 1e6), "brokers": {"b/1": {**QUIET, "state": "UP"}, "TxnCoordinator": coordinator}, "age": 1}
    )


def begun(at: float = 10.0, **counters: int) -> TransactionGuard:
    guard = TransactionGuard()
    guard.opened(at)
    guard.observe(statistics(at, **counters))
    guard.begin()
    return guard


def test_statistics_older_than_the_last_transaction_do_not_count() -> None:
    """Neither before the client was ready nor between the end of a transaction and the next report."""
    guard = TransactionGuard()
    guard.observe(statistics(9.0))
    assert not guard.fresh
    guard.opened(10.0)
    assert not guard.fresh
    guard.observe(statistics(10.0))
    assert guard.fresh
    guard.begin()
    guard.ended(11.0)
    guard.observe(statistics(10.99))
    assert not guard.fresh
    guard.observe(statistics(11.01, ends=1))
    assert guard.fresh


@pytest.mark.parametrize(
    ("counters", "problem"),
    [
        ({}, ""),
        ({"req_timeouts": 1}, "a request timed out"),
        ({"txretries": 1}, "a request was sent again"),
        ({"disconnects": 1}, "a broker closed the connection"),
        ({"ends": 2}, "the end of a transaction was requested twice"),
    ],
)
def test_any_sign_of_a_lost_or_repeated_request_is_a_problem(counters: dict[str, int], problem: str) -> None:
    """But only since the last transaction began. A busy coordinator makes the client request the end twice."""
    signs = {"req_timeouts": 3, "txretries": 4, "disconnects": 5}
    guard = begun(**signs)
    guard.ended(11.0)
    now = {name: count + counters.get(name, 0) for name, count in signs.items()}
    guard.observe(statistics(12.0, counters.get("ends", 1), **now))
    assert guard.problem() == problem


REPEATED = {**QUIET, "txretries": 1}
NEW = {**QUIET, "req": {"Produce": 1}}


@pytest.mark.parametrize(
    ("of_broker_2", "problem"),
    [
        ([QUIET, QUIET], ""),
        ([REPEATED, REPEATED], "a request was sent again"),
        ([REPEATED, None], "a request was sent again"),
        ([None, None], "a broker left the cluster"),
        ([None, QUIET], "a broker left the cluster"),
        ([NEW, QUIET], "a broker left the cluster and returned"),
    ],
)
def test_a_broker_that_leaves_takes_no_sign_along(of_broker_2: list[dict[str, Any] | None], problem: str) -> None:
    """Its counters are gone too, so its leaving is a sign. A configured address is left by every client."""
    guard = TransactionGuard()
    guard.opened(10.0)
    for at, second in enumerate([QUIET, *of_broker_2], 10):
        brokers = {"b/1": QUIET, "b/2": second, "b/bootstrap": QUIET if at == 10 else None}
        guard.observe(json.dumps({"ts": at * 1_000_000, "brokers": {name: b for name, b in brokers.items() if b}}))
        if at == 10:
            guard.begin()
    assert guard.problem() == problem


def test_a_client_is_replaced_before_its_epochs_end() -> None:
    """Sixteen bits, and nobody looks."""
    guard = begun()
    for number in range(MOST_TRANSACTIONS):
        assert guard.problem() == ""
        guard.begin()
        guard.ended(11.0 + number)
    assert str(MOST_TRANSACTIONS) in guard.problem()
