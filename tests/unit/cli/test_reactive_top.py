"""`headrace reactive top`: from the responses of a process to a table that fits the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from headrace.cli.reactive import Poll, drawn, rows

URL = "http://127.0.0.1:8082"


def summary(name: str = "orders", delivered: int = 0, **changed: Any) -> dict[str, Any]:
    """Return a summary as the process answers it."""
    return {
        "name": name,
        "paused": None,
        "breaker": {"state": "closed", "until": None, "why": ""},
        "counts": {"taken": 9, "delivered": delivered, "deadLetters": 0},
        "lag": 0,
        "inFlight": 0,
        "oldestSeconds": None,
        "attempts": 1,
        "why": "",
        **changed,
    }


def text(poll: Poll, width: int = 80) -> list[str]:
    """Return the printed lines below the first, which has the time."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(drawn(URL, poll, rows(None, poll)))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()][1:]


@pytest.mark.parametrize(
    ("before", "rate"),
    [
        (Poll(10.0, [summary(delivered=100)]), 30.0),
        (None, None),
        (Poll(10.0, (), "away"), None),
        (Poll(10.0, [summary("other")]), None),
        (Poll(10.0, [summary(delivered=999)]), None),
    ],
    ids=["known", "first poll", "process was away", "new consumer", "started anew"],
)
def test_rates_are_of_records_completed_between_two_polls(before: Poll | None, rate: float | None) -> None:
    """Delivered records and dead letters count; without an earlier count there is no rate."""
    counts = {"taken": 99, "delivered": 150, "deadLetters": 10, "redeliveries": 7}
    assert rows(before, Poll(12.0, [summary(counts=counts)]))[0].records_per_second == rate


def test_consumers_with_trouble_are_first() -> None:
    """Open breakers, then stalled consumers, then paused ones, then the others by name."""
    paused = {"by": "ada", "since": "2026-01-01T00:00:00Z", "reason": "deploy"}
    open_ = {"state": "open", "until": None, "why": "HTTP 503"}
    consumers = [
        summary("b"),
        summary("a"),
        summary("paused", paused=paused, why="paused by ada"),
        summary("stuck", why="a retry is due"),
        summary("broken", breaker=open_, why="the breaker is open"),
    ]
    assert [row.consumer for row in rows(None, Poll(0.0, consumers))] == ["broken", "stuck", "paused", "a", "b"]


def test_the_table_at_80_columns() -> None:
    """Numbers are below their titles, and the reasons below the table."""
    busy = summary("orders", lag=1_234_567, inFlight=800, oldestSeconds=7200.0, attempts=3, why="a retry is due")
    assert text(Poll(0.0, [busy, summary("parcels", lag=None)])) == [
        "CONSUMER  REC/S     LAG  IN FLIGHT  TRIES  BREAKER  OLDEST",
        "orders        -  1,235k        800      3   closed      2h",
        "parcels       -       -          0      1   closed       -",
        "orders: a retry is due",
    ]


@pytest.mark.parametrize("width", [80, 60, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    """Long names are cut; reasons are wrapped and never cut, also with control characters and wide letters."""
    why = "waiting for the backend: HTTP 500\r\n\x1b[31m" + "很慢 " * 60 + "so look at its log"
    long = summary("invoices-of-every-country-" * 5, lag=10**12, inFlight=10**6, why=why, oldestSeconds=1e9)
    lines = text(Poll(0.0, [long], "Headrace is unreachable there " * 9), width)
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)
    assert "".join(lines).count("很慢") == 60
    assert " ".join(lines).count("Headrace") == 9
    assert " ".join(" ".join(lines).split()).endswith("so look at its log")
