"""The page of results: one section per table, each with the day on which it was measured."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from bench.environment import PARTITIONS, Table

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = f"""\
# Measured

`python -m bench.peers` measures other products and Headrace, `python -m bench.curve` the cost of a record, and
`python -m bench.soak` what everything at once takes. One KRaft broker with the dev cluster's ordinary flags,
{PARTITIONS} partitions; broker, load generator and backend share the processors with what is measured. Ratios within
one run bind, absolute figures drift.
"Processor" is the processor time of the product and its children per record, "generator" the share of one processor
that the load generator or the backend took, "stolen" the share of the machine that the hypervisor gave to others:
compare figures only between rows with little of it.
"""


class Page:
    """Sections by title, in the order in which they were first written."""

    def __init__(self, text: str) -> None:
        """Take the sections of a page that exists."""
        self.sections = {part.split("\n", 1)[0]: part.rstrip() for part in re.split(r"^## ", text, flags=re.M)[1:]}

    def put(self, table: Table, scale: float) -> None:
        """Replace the section with its title, or append it."""
        when = f"Measured on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} processors, `--scale {scale:g}`."
        rows = "\n".join(table.lines())
        self.sections[table.title] = f"{table.title}\n\n{when}\n\n{table.text}\n\n{rows}"

    def text(self) -> str:
        """Return the whole page."""
        return "\n".join([HEAD, *(f"## {section}\n" for section in self.sections.values())])
