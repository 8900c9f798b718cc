"""The page of results: one section per table, each with the day on which it was measured."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version

from bench.environment import PARTITIONS, Table

PACKAGES = ("confluent-kafka", "uvicorn", "httptools", "msgspec")
HEAD = f"""\
# Measured

`make bench` writes this page. `python -m bench --rows push,replay` measures some of its sections anew, and
`python -m bench.peers` other products and Headrace. One KRaft broker with the dev cluster's ordinary flags,
{PARTITIONS} partitions; broker, load generator and backend share the processors with Headrace. Ratios within one run
bind, absolute figures drift.
"Processor" is the processor time of Headrace and its children per record or request, "generator" the share of one
processor that the load generator or the backend took, "stolen" the share of the machine that the hypervisor gave to
others: compare figures only between rows with little of it.
"""


class Page:
    """Sections by title, in the order in which they were first written."""

    def __init__(self, text: str) -> None:
        """Take the sections of a page that exists."""
        self.sections = {part.split("\n", 1)[0]: part.rstrip() for part in re.split(r"^## ", text, flags=re.M)[1:]}

    def put(self, table: Table, scale: float) -> None:
        """Replace the section with its title, or append it."""
        rows = "\n".join(table.lines())
        self.sections[table.title] = f"{table.title}\n\n{when(scale)}\n\n{table.text}\n\n{rows}"

    def text(self) -> str:
        """Return the whole page."""
        return "\n".join([HEAD, *(f"## {section}\n" for section in self.sections.values())])


def when(scale: float) -> str:
    """Return a line about the day, the machine and the versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} processors, {1_000_000 * scale:,.0f} records per "
        f"run, CPython {platform.python_version()}, {versions}."
    )
