"""Memory and open files of each part of a process, for docs/sizing.md: `python -m bench.sizing`.

Each row is a process that has been ready for some seconds, without load. Memory is PSS: what several processes share
counts in parts, so that the sum over a process and its children is what they take.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.environment import Bench, ask, pid
from bench.measured import table
from headrace_devkit.devcluster import Cluster

SETTLED_SECONDS = 8.0
MANY = 20
GROUP = "/consumers/sizing-{}"


def tree(root: int) -> Iterator[int]:
    """Yield a process and all below it; a thread or a process that ends meanwhile is left out."""
    yield root
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{root}/task").iterdir():
            yield from _children(task)


def _children(task: Path) -> Iterator[int]:
    try:
        children = (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield from tree(int(child))


def megabytes(process: int) -> float:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


class Row:
    """What one process takes with its children."""

    def __init__(self, bench: Bench, name: str, config: dict[str, Any], instances: int = 0, topic: str = "") -> None:
        process = bench.headrace(config)
        try:
            for number in range(instances):
                body = {"name": "i", "format": "binary"}
                ask(process.url + GROUP.format(number), body)
                ask(f"{process.url}{GROUP.format(number)}/instances/i/subscriptions", {"topics": [topic]})
            time.sleep(SETTLED_SECONDS)
            own, *children = tree(pid(process))
            status = Path(f"/proc/{own}/status").read_text()
            self.name = name
            self.own, self.children = megabytes(own), [megabytes(child) for child in children]
            self.files = len(list(Path(f"/proc/{own}/fd").iterdir()))
            self.threads = int(re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
        finally:
            process.terminate()

    @property
    def cells(self) -> str:
        children = " + ".join(f"{one:.0f}" for one in self.children if one >= 1)
        return f"{self.name} | {self.own:.0f} MB | {children or '-'} | {self.files} | {self.threads}"


def reactive(topic: str, count: int) -> dict[str, Any]:
    one = {"topics": [topic], "backend": {"url": "http://127.0.0.1:1/"}}
    return {"reactive_consumers": {f"c{number}": {**one, "group": f"sizing-r{number}"} for number in range(count)}}


def rows(bench: Bench, folder: Path, topic: str) -> Iterator[Row]:
    yield Row(bench, "idle", {})
    yield Row(bench, "1 reactive consumer, 8 partitions", reactive(topic, 1))
    yield Row(bench, f"{MANY} reactive consumers, 8 partitions each", reactive(topic, MANY))
    yield Row(bench, f"{MANY} active instances, 8 partitions each", {}, MANY, topic)
    (folder / "main.py").write_text("def handler(context, event):\n    return None\n")
    trigger = {"kind": "kafka-cluster", "numWorkers": 2, "attributes": {"topics": [topic], "consumerGroup": "sizing-f"}}
    spec = {"handler": "main:handler", "triggers": {"t": trigger}}
    (folder / "function.yaml").write_text(str({"metadata": {"name": "f"}, "spec": spec}))
    yield Row(bench, "a function with 2 workers", {"functions": [str(folder / "function.yaml")]})
    kept = {"topic": topic, "schema": "item STRING, n BIGINT"}
    yield Row(bench, "a table", {"tables": {"stock": kept}})
    flow = {
        "sql": "SELECT item, count(*) AS n FROM orders GROUP BY item",
        "sink": {"topic": bench.topic("out"), "key": "item"},
    }
    source = {"orders": {"topic": topic, "schema": "item STRING, n INT"}}
    (folder / "pipeline.yaml").write_text(str({"name": "p", "sources": source, "flows": {"by_item": flow}}))
    yield Row(bench, "a pipeline, `driver.heap_bytes` 1 GiB", {"pipelines": [str(folder / "pipeline.yaml")]})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), 1.0)
        found = []
        for row in rows(bench, Path(folder), bench.topic("sizing")):
            found.append(row)
            print(row.cells, flush=True)
        print(
            "\n".join(
                table("process | memory | its children, MB each | open files | threads", [one.cells for one in found])
            )
        )


if __name__ == "__main__":
    main()
