"""A function that keeps a journal of its calls, and the processes that run it; the ledger of pushes judges it.

The journal, the topics and the group's commits are the recording, nothing of what Headrace reports of itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Fault, HeadraceProcess, RecordingBackend
from tests.faults.push_scenario import PushScenario
from yaml_table import table

JOURNAL = table(__file__, "journal")


class FunctionScenario(PushScenario):
    """A topic, its dead letter topic, a function with a journal, and Headrace processes of its group."""

    def __init__(self, cluster: Any, start: Any, folder: Path, code: str, **given: Any) -> None:
        """`code` defines `act(context, event)`; `attributes`, `trigger` and `spec` add keys to the file."""
        super().__init__(cluster, start, folder, backend=RecordingBackend(), partitions=given.get("partitions", 4))
        self.settings = {"ordering": given.get("ordering", "partition")}
        self.journal.touch()
        self.file = folder / "function.yaml"
        (folder / "act.py").write_text(JOURNAL.format(journal=str(self.journal)) + code)
        attributes = {
            "topics": given.get("topics", [self.topic]),
            "consumerGroup": self.group,
            "retry": {"attempts": 2, "first_delay_seconds": 0.05, "max_delay_seconds": 0.2},
            **self.settings,
            **given.get("attributes", {}),
        }
        trigger = {"kind": "kafka-cluster", "numWorkers": 2, **given.get("trigger", {}), "attributes": attributes}
        spec = {"handler": "act:handler", "triggers": {"push": trigger}, **given.get("spec", {})}
        self.file.write_text(yaml.safe_dump({"metadata": {"name": "act"}, "spec": spec}))

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process of the group."""
        return {"kafka": super().config["kafka"], "functions": [str(self.file)]}

    def write_values(self, *values: str) -> None:
        """Write records with these values and few keys."""
        self.written += len(values)
        self.write(
            self.topic, *(OutgoingRecord(self.topic, b"k%d" % (n % 7), v.encode()) for n, v in enumerate(values))
        )

    def fault_since(self, begin: float, most: float) -> None:
        """Record that this many records up to now may be called again."""
        self.faults.append(Fault(begin, time.time(), most))


def descriptors(process: HeadraceProcess) -> int:
    """Return how many descriptors a process has open."""
    return len(list(Path(f"/proc/{process.server.id.pid}/fd").iterdir()))


def children(process: HeadraceProcess) -> list[int]:
    """Return the processes that a process has started."""
    pid = process.server.id.pid
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
