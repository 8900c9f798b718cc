"""`headrace status`: one page about a running Headrace, from its HTTP API, with what needs a person first."""

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import click

from headrace.cli.api import Api, api_options
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.output import aligned, cell, counted, print_json, printable
from headrace.cli.trust import START
from headrace.client.attention import PARTS, Need, kafka_outage, needs_of
from headrace.errors import HeadraceError

_LIMIT_SECONDS: Final = 10.0
_PAGE_SECONDS: Final = 2.0
_COLUMNS: Final = 100
_NEEDS_KAFKA: Final = ("cluster", "dead_letters", "instances")
_COMPLETED: Final = ("delivered", "deadLetters", "delayed", "filtered", "skipped", "discarded")
_NEED: Final = ("severity", "about", "why", "command")
_COLOURS: Final = {"outage": "red", "stopped": "red", "degraded": "yellow", "paused": "yellow"}
_UNKNOWN_CALLER: Final = 401
_ABSENT: Final = (404, 503)
"""Statuses of a part that the process does not have, or not now; others are named on the page."""


class Poll(NamedTuple):
    """What a process responds at one moment."""

    seconds: float
    """Of the monotonic clock."""
    parts: Mapping[str, Any]
    """By the names of `PARTS`; those that could not be read are missing."""
    refused: Mapping[str, str]
    """Parts that the caller may not see, and why."""
    problem: str = ""
    """Why the process does not respond."""
    remedy: str = START

    @property
    def needs(self) -> list[Need]:
        """What needs a person, worst first."""
        if self.problem:
            return [Need("outage", "headrace", self.problem, self.remedy)]
        return needs_of(self.parts)


@click.command(cls=HeadraceCommand)
@click.option("--watch", is_flag=True, help="Refresh in place every 2 s, with records per second, until Ctrl-C.")
@api_options
def status(watch: bool, api: Api, output: str) -> int:
    """Show one page: Kafka, services, consumers, functions, pipelines, tables, dead letters left, active instances.

    What needs a person is first, worst first, with the reason and the command that helps. The exit code is 1 if
    Headrace or Kafka is unreachable, or the token is not valid.

    Example: headrace status --watch
    """
    api.limit_seconds = _LIMIT_SECONDS
    before = poll(api)
    if not watch:
        if output == "json":
            print_json(document(api.url, before, None))
        else:
            click.echo(page(api.url, before, None))
        return int(bool(before.problem or kafka_outage(before.parts)))
    with contextlib.suppress(KeyboardInterrupt), _screen(output) as show:
        show(api.url, before, None)
        while True:
            time.sleep(_PAGE_SECONDS)
            now = poll(api)
            show(api.url, now, before)
            before = now
    return 0


def poll(api: Api) -> Poll:
    """Return what a process responds."""
    at, parts, refused = time.monotonic(), dict[str, Any](), dict[str, str]()
    for name, path in PARTS.items():
        if name in _NEEDS_KAFKA and kafka_outage(parts):
            continue
        try:
            parts[name] = api.read(path)
        except HeadraceError as problem:
            if remedy := problem.parameters.get("remedy"):  # there was no response
                return Poll(at, {}, {}, problem.description, remedy)
            if problem.status not in _ABSENT:
                refused[name] = problem.description
            if problem.status == _UNKNOWN_CALLER and api.has_token:
                text = f"the token is not valid here (401), so most is not shown: {problem.description}"
                return Poll(at, parts, refused, text, "export HEADRACE_TOKEN=TOKEN")
    return Poll(at, parts, refused)


def document(url: str, now: Poll, before: Poll | None) -> dict[str, Any]:
    """Return the page as JSON."""
    return {
        "at": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "url": url,
        "problem": now.problem,
        "needs": [{field: getattr(need, field) for field in _NEED} for need in now.needs],
        "recordsPerSecond": rates(before, now),
        "notShown": dict(now.refused),
        **now.parts,
    }


def rates(before: Poll | None, now: Poll) -> dict[str, float | None]:
    """Return the records per second that each consumer has completed since the previous page."""
    earlier = {one["name"]: _completed(one) for one in _list(before, "consumers")} if before else {}
    found: dict[str, float | None] = {}
    for one in _list(now, "consumers"):
        count = _completed(one) - earlier.get(one["name"], sys.maxsize)
        found[one["name"]] = count / (now.seconds - before.seconds) if before and count >= 0 else None
    return found


def page(url: str, now: Poll, before: Poll | None) -> str:
    """Return the page as text with colours, which `click.echo` leaves out without a terminal."""
    needs, lines = now.needs, [_head(url, now)]
    lines += [_kafka(now), ""]
    if needs:
        lines.append(click.style(f"NEEDS YOU: {counted(len(needs), 'thing')}, the worst first", bold=True))
    for need in needs:
        lines.append(click.style(_wrapped(f"{need.about}: {need.why}"), fg=_COLOURS[need.severity]))
        lines.append(f"    {printable(need.command)}")
    for title, rows in _tables(now, rates(before, now)):
        if rows:
            lines += ["", click.style(title, bold=True)]
            titles = [name.upper() for name in rows[0]]
            lines += aligned([titles, *([cell(value) for value in row.values()] for row in rows)])
    if now.refused:
        lines += ["", f"not shown: {', '.join(now.refused)}: {next(iter(now.refused.values()))}"]
    return "\n".join(lines)


def _head(url: str, now: Poll) -> str:
    at = f"{datetime.now():%H:%M:%S}  {url}"
    if now.problem and not now.refused:
        return f"{at}: unreachable"
    report = now.parts.get("readiness")
    if not report:
        return f"{at}: its readiness is not known"
    state = "ready" if report.get("ready") else "not ready"
    if "services" not in report:
        return f"{at}: {state}; its services are shown to known callers only"
    services = report["services"]
    placement = services.get("placement", {}).get("reason", "")
    ready = f"{sum(one['ready'] for one in services.values())} of {counted(len(services), 'service')}"
    return "; ".join(filter(None, [f"{at}: {state}, {ready}", placement]))


def _kafka(now: Poll) -> str:
    if why := kafka_outage(now.parts):
        return _wrapped(f"Kafka: {why}")
    brokers = _list(now, "cluster", "brokers")
    return f"Kafka: {counted(len(brokers), 'broker')}" if brokers else "Kafka: not known"


def _tables(now: Poll, speed: Mapping[str, float | None]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    consumers = _list(now, "consumers")
    for title, kind in (("CONSUMERS", "reactive"), ("FUNCTIONS", "function")):
        yield title, [_consumer(one, speed) for one in consumers if one["kind"] == kind]
    yield (
        "PIPELINES",
        [
            {
                "name": one["name"],
                "state": one["state"],
                "flows": len(one["flows"]),
                "lag": _sum(flow.get("lagRecords") for flow in one["flows"].values()),
                "restarts": one["restarts"],
            }
            for one in _list(now, "pipelines")
        ],
    )
    names = ("name", "state", "rows", "lag")
    yield "TABLES", [{name: one[name] for name in names} for one in _list(now, "tables")]
    yield (
        "DEAD LETTERS",
        [
            {"topic": one["topic"], "left": one["left"], "oldest": one["oldest"], "newest": one["newest"]}
            for one in _list(now, "dead_letters", "topics")
        ],
    )
    yield (
        "ACTIVE INSTANCES",
        [
            {
                "name": f"{one['group']}/{one['name']}",
                "principal": one["principal"] or None,
                "topics": one["topics"],
                "partitions": len(one["lags"]),
                "lag": one["lag"],
                "idle": f"{one['idleSeconds']:.0f} s",
                "buffered": f"{one['bufferedBytes'] / 1024:.0f} KiB",
                "reading": one["isReading"],
            }
            for one in _list(now, "instances", "consumers")
        ],
    )


def _consumer(one: Mapping[str, Any], speed: Mapping[str, float | None]) -> dict[str, Any]:
    state = "paused" if one["paused"] else "no Kafka" if one.get("kafka") else one["breaker"]["state"]
    rate, oldest = speed.get(one["name"]), one["oldestSeconds"]
    return {
        "name": one["name"],
        "group": one["group"],
        "state": "runs" if state == "closed" else state,
        "rec/s": None if rate is None else f"{rate:,.0f}",
        "lag": one["lag"],
        "in flight": one["inFlight"],
        "tries": one["attempts"],
        "oldest": None if oldest is None else f"{oldest:.0f} s",
    }


def _sum(values: Iterator[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _list(poll: Poll, part: str, key: str = "") -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = (poll.parts.get(part) or {}).get(key or part, [])
    return found


def _completed(summary: Mapping[str, Any]) -> int:
    return sum(summary["counts"].get(name, 0) for name in _COMPLETED)


def _wrapped(text: str) -> str:
    width = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)
    words = " ".join(printable(text).split())
    return textwrap.fill(words, width, subsequent_indent="  ", break_on_hyphens=False)


@contextlib.contextmanager
def _screen(output: str) -> Iterator[Callable[[str, Poll, Poll | None], None]]:
    if output == "json":
        yield lambda *given: click.echo(json.dumps(document(*given), ensure_ascii=False))
    elif not sys.stdout.isatty():
        yield lambda *given: click.echo(page(*given) + "\n")
    else:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            yield lambda *given: live.update(Text.from_ansi(page(*given)), refresh=True)
