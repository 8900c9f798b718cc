"""The tables of a run: each ratio with its goal, and each side with its medians and tails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.measured import Measured, median_of, table
from bench.peers.rows import Row, Side

Runs = dict[tuple[str, str], list[Measured]]
"""Row, side, and what each round found."""
RATIOS = "job | side | divided by | ratio | by round | processor time each, divided | goal"
SIDES = (
    "job | side | per s | least to most | processor us each | p50 ms | p99 ms | max ms | least | generator | stolen"
    " | others | n"
)


def lines(rows: Mapping[str, Row], runs: Runs) -> list[str]:
    """Return both tables; a side without a run is left out."""
    ratios = [line for row in rows.values() for side in row.sides if side.over and (line := ratio(row, side, runs))]
    sides = [
        " | ".join([row.title, side.name, *cells(found)])
        for row in rows.values()
        for side in row.sides
        if (found := runs.get((row.title, side.name)))
    ]
    return [*table(RATIOS, ratios), "", *table(SIDES, sides)]


def ratio(row: Row, side: Side, runs: Runs) -> str:
    """Return the line of one ratio; for times the smaller one is the better one."""
    names = [one.name for one in row.sides if one.name.startswith(side.over) and one != side]
    others = {name: runs[row.title, name] for name in names if (row.title, name) in runs}
    own = runs.get((row.title, side.name))
    if not own or not others:
        return ""
    what, best = ("rate", max) if row.field == "rate" else ("p50", min)
    over, other = best(others.items(), key=lambda item: median_of(row.field, item[1]))
    found = median_of(row.field, own) / median_of(row.field, other)
    cpu = median_of("cpu_us", own) / median_of("cpu_us", other)
    each = [getattr(one, row.field) / getattr(two, row.field) for one, two in zip(own, other, strict=False)]
    goal = f"{'>=' if what == 'rate' else '<='} {side.goal:g}" if side.goal else ""
    by_round = f"{min(each):.2f} to {max(each):.2f}"
    return f"{row.title}, {what} | {side.name} | {over} | **{found:.2f}** | {by_round} | {cpu:.2f} | {goal}"


def cells(runs: Sequence[Measured]) -> list[str]:
    """Return the cells of one side after its name."""
    rates = [one.rate for one in runs]
    p50, p99 = (f"{median_of(field, runs):.2f}" for field in ("p50_ms", "p99_ms"))
    longest = max(one.longest_ms for one in runs)
    tails = [p50, p99, f"{longest:.0f}"] if longest else [""] * 3
    least = min(one.least for one in runs)
    stolen, others = (f"{max(getattr(one, field) for one in runs):.0%}" for field in ("stolen", "others"))
    return [
        f"{median_of('rate', runs):,.0f}",
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        f"{median_of('cpu_us', runs):,.1f}",
        *tails,
        f"{least:.2f}" if least else "",
        f"{median_of('load', runs):.0%}",
        stolen,
        others,
        str(len(runs)),
    ]
