"""`headrace reactive top`: from the answers of processes to lines that fit the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from headrace.cli.reactive_top import Poll, lines, rows

ONE, TWO = "http://127.0.0.1:8082", "http://127.0.0.1:8083"


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
    """Return the lines below the first, which has the time."""
    return [line for line, _ in lines(poll, rows(None, poll), width)][1:]


def test_rates_are_what_ended_between_two_polls() -> None:
    """Delivered records and dead letters count, records that were only taken do not."""
    before = Poll(10.0, {ONE: [summary(delivered=100)]})
    counts = {"taken": 99, "delivered": 150, "deadLetters": 10, "redeliveries": 7}
    now = Poll(12.0, {ONE: [summary(counts=counts)]})
    assert rows(before, now)[0].records_per_second == 30.0


@pytest.mark.parametrize(
    "before",
    [None, Poll(10.0, {ONE: "away"}), Poll(10.0, {}), Poll(10.0, {ONE: [summary("other"), summary(delivered=9)]})],
)
def test_without_an_earlier_count_there_is_no_rate(before: Poll | None) -> None:
    """The first poll, a process that was away, one that has begun anew, and a consumer that is new."""
    assert rows(before, Poll(12.0, {ONE: [summary(delivered=5)]}))[0].records_per_second is None


def test_processes_of_one_deployment_are_one_row() -> None:
    """Rates and what is in flight are added; lag, attempts and age are the largest; the worse breaker counts."""
    first = summary(delivered=10, lag=7, inFlight=2, oldestSeconds=5.0, attempts=1)
    second = summary(delivered=0, lag=None, inFlight=3, attempts=4, why="waiting")
    second["breaker"] = {"state": "half-open", "until": None, "why": "HTTP 503"}
    before = Poll(0.0, {ONE: [summary()], TWO: [summary()]})
    (row,) = rows(before, Poll(2.0, {ONE: [first], TWO: [second]}))
    assert row == ("orders", 5.0, 7, 5, 4, "half-open", 5.0, False, "waiting")


def test_trouble_comes_first() -> None:
    """Open breakers, then what stands still, then what somebody paused, then the others by name."""
    paused = {"by": "ada", "since": "2026-01-01T00:00:00Z", "reason": "deploy"}
    open_ = {"state": "open", "until": None, "why": "HTTP 503"}
    poll = Poll(
        0.0,
        {
            ONE: [
                summary("b"),
                summary("a"),
                summary("paused", paused=paused, why="paused by ada"),
                summary("stuck", why="a retry is due"),
                summary("broken", breaker=open_, why="the breaker is open"),
            ]
        },
    )
    assert [row.consumer for row in rows(None, poll)] == ["broken", "stuck", "paused", "a", "b"]


def test_the_table_at_80_columns() -> None:
    """Numbers stand under their titles, and a sentence has a line of its own below its consumer."""
    busy = summary("orders", lag=1_234_567, inFlight=800, oldestSeconds=7200.0, attempts=3, why="a retry is due")
    assert text(Poll(0.0, {ONE: [busy, summary("parcels", lag=None)]})) == [
        "CONSUMER    REC/S      LAG  IN FLIGHT  TRIES    BREAKER  OLDEST",
        "orders          -   1,235k        800      3     closed      2h",
        "  a retry is due",
        "parcels         -        -          0      1     closed       -",
    ]


@pytest.mark.parametrize("width", [80, 60, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    """Long names are cut; sentences are wrapped, with line breaks, control characters and wide letters in them."""
    why = "waiting for the backend: HTTP 500\r\n\x1b[31m" + "很慢 " * 60
    long = summary("invoices-of-every-country-" * 5, lag=10**12, inFlight=10**6, why=why, oldestSeconds=1e9)
    poll = Poll(0.0, {ONE: [long], TWO: "no Headrace answers there " * 9})
    drawn = text(poll, width)
    assert max(map(cell_len, drawn)) <= width
    assert all(line.isprintable() for line in drawn)
    assert "".join(drawn).count("很慢") == 60
    assert "".join(drawn).count("Headrace") == 9


def test_a_long_reason_is_wrapped_and_never_cut() -> None:
    """What to do stands at the end of the reason."""
    why = "waiting for the backend: " + "HTTP 500 and again " * 20 + "so look at its log"
    drawn = text(Poll(0.0, {ONE: [summary("orders", why=why)]}))
    assert " ".join(" ".join(drawn).split()).endswith(why)
    assert max(map(len, drawn)) <= 80


def test_without_consumers_it_says_so() -> None:
    """An empty table is its first line alone."""
    (drawn,) = lines(Poll(0.0, {ONE: []}), [], 80)
    assert drawn[0].endswith("0 consumers, 0 paused or in trouble")


def test_a_process_that_does_not_answer_is_a_line() -> None:
    """The others go on being shown."""
    drawn = text(Poll(0.0, {ONE: "no Headrace answers", TWO: [summary()]}))
    assert drawn[0] == f"{ONE}: no Headrace answers"
    assert drawn[2].startswith("orders ")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (99, "99s"), (100, "2m"), (7200, "2h"), (900_000, "10d"), (None, "-")]
)
def test_ages_are_short(seconds: float | None, shown: str) -> None:
    """The oldest record's age has at most three digits and a unit."""
    assert text(Poll(0.0, {ONE: [summary(oldestSeconds=seconds)]}))[1].endswith(f" {shown}")
