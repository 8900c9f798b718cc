"""Measure parts of Headrace, and print the tables: `python -m bench --help`. Other products: `python -m bench.peers`.

Each row sets Headrace against a bare loop over the same client, on the same broker, in the same run. Machines differ
and their speed drifts, so the ratio is what counts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.active import ActiveTable
from bench.audit import AuditTable
from bench.compare import ROWS, compare
from bench.control import ControlTable
from bench.core import CoreTable
from bench.dead_letters import DeadLetterTable
from bench.environment import Bench, Table
from bench.function import FunctionTable
from bench.liveness import LivenessTable
from bench.page import RESULTS, Page
from bench.pipelines import DelayTable, PipelineTable
from bench.processes import ProcessesTable
from bench.produce import ProduceTable
from bench.push_queries import PushQueryTable
from bench.replay import ReplayTable
from bench.rolling_restart import RollingRestartTable
from bench.secured import SecuredTable
from bench.sql import SqlTable
from headrace_devkit.devcluster import Cluster

TABLES: dict[str, Callable[[Bench], Table]] = {
    "core": CoreTable,
    "produce": ProduceTable,
    "processes": ProcessesTable,
    "liveness": LivenessTable,
    "function": FunctionTable,
    "active": ActiveTable,
    "replay": ReplayTable,
    "audit": AuditTable,
    "dead-letters": DeadLetterTable,
    "secured": SecuredTable,
    "pipelines": PipelineTable,
    "pipeline-delays": DelayTable,
    "sql": SqlTable,
    "push-queries": PushQueryTable,
    "rolling-restart": RollingRestartTable,
    "control": ControlTable,  # late, because the broker keeps its 1,000 partitions
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Headrace against bare loops.")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is a million records per run")
    parser.add_argument("--rows", default="", help=f"some of {','.join(TABLES)}; with --compare of {','.join(ROWS)}")
    parser.add_argument("--write", action="store_true", help="put the sections of the rows into RESULTS.md")
    parser.add_argument("--compare", metavar="REV", help="measure this commit and the present source in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of --compare")
    found = parser.parse_args()
    known = ROWS if found.compare else TABLES
    found.rows = found.rows.split(",") if found.rows else list(known)
    if unknown := [row for row in found.rows if row not in known]:
        parser.error(f"--rows: {', '.join(unknown)} is not one of {', '.join(known)}")
    return found


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), chosen.scale)
        if chosen.compare:
            compare(bench, chosen.compare, chosen.rows, chosen.rounds)
            return
        for name in chosen.rows:
            table = TABLES[name](bench)
            table.measure()
            page = Page(RESULTS.read_text())
            page.put(table, chosen.scale)
            print(page.sections[table.title], flush=True)
            if chosen.write:
                RESULTS.write_text(page.text())


if __name__ == "__main__":
    main()
