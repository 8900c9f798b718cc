"""A function that writes its calls to a file, the processes that run it, and what its group has committed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from confluent_kafka.admin import AdminClient

from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import HeadraceProcess

PRELUDE = """
import asyncio, os, pathlib, time
from nuclio import QualifiedOffset


def note(what, partition=-1, offset=-1):
    with open({lines!r}, "a") as file:
        file.write(f"{{os.environ['PROCESS']}} {{os.getpid()}} {{what}} {{partition}} {{offset}}\\n")


async def acknowledge(context, *positions):
    for position in positions:
        topic, partition, offset = position.rsplit(":", 2)
        await context.platform.explicit_ack(QualifiedOffset(topic, int(partition), int(offset)))


"""


def function_file(folder: Path, code: str, triggers: Mapping[str, Any], *, name: str = "work", **spec: Any) -> str:
    """Write a function whose handler is `handler` of work.py, and return its file."""
    (folder / "work.py").write_text(code)
    file = folder / "function.yaml"
    described = {"handler": "work:handler", "triggers": dict(triggers), **spec}
    file.write_text(yaml.safe_dump({"metadata": {"name": name}, "spec": described}))
    return str(file)


class Line(NamedTuple):
    """What a handler has written."""

    process: str
    """The name of the Headrace process."""
    pid: int
    """Of the worker."""
    what: str
    partition: int
    offset: int


class FunctionCalls:
    """One function; `note` in its code writes a line, and `acknowledge` takes positions as `topic:partition:offset`."""

    def __init__(self, site: Any, headrace: Callable[..., HeadraceProcess], folder: Path, source: str) -> None:
        self.site, self.source, self.group = site, source, f"{source}-calls"
        self._headrace, self._folder, self._file = headrace, folder, folder / "lines"

    def start(
        self,
        code: str,
        *,
        name: str = "one",
        trigger: Mapping[str, Any] | None = None,
        wait: bool = True,
        **attributes: Any,
    ) -> HeadraceProcess:
        """Run the function in a process of this name.

        Args:
            code: Of the handler.
            name: Of the process, in its lines.
            trigger: Keys of the trigger.
            wait: Until it is ready.
            attributes: Of the trigger.
        """
        known = {"topics": [self.source], "consumerGroup": self.group, "workerAllocationMode": "static"}
        made = {"kind": "kafka-cluster", "numWorkers": 1, **(trigger or {})}
        often = {"properties": {"auto.commit.interval.ms": 100, **attributes.pop("consumer", {}).get("properties", {})}}
        made["attributes"] = {**known, "retry": {"attempts": 1}, "consumer": often, **attributes}
        file = function_file(self._folder, PRELUDE.format(lines=str(self._file)) + code, {"in": made})
        return self._headrace({**self.site.config, "functions": [file]}, wait=wait, env={"PROCESS": name})

    def write(self, partition: int, *values: str, key: bytes | None = None) -> None:
        """Write records of one key to a partition."""
        records = (OutgoingRecord(self.source, key, value.encode(), None, partition) for value in values)
        self.site.write(self.source, *records)

    @property
    def lines(self) -> list[Line]:
        """What was written so far, in its order."""
        text = self._file.read_text() if self._file.exists() else ""
        found = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [Line(process, int(pid), what, int(p), int(o)) for process, pid, what, p, o in found]

    def of(self, what: str, process: str = "") -> list[Line]:
        """Return the lines of a kind, of one process or of all."""
        return [line for line in self.lines if line.what == what and process in ("", line.process)]

    def counts(self, what: str, partition: int = 0) -> dict[int, int]:
        """Return how many lines of a kind each offset of a partition has."""
        return dict(Counter(line.offset for line in self.of(what) if line.partition == partition))

    def wait_lines(self, count: int, what: str, process: str = "") -> None:
        """Wait for this many lines of a kind."""
        self.site.wait_until(lambda: len(self.of(what, process)) >= count, f"{count} lines {what}")

    @property
    def committed(self) -> dict[int, int]:
        """The committed offsets by partition."""
        found: Mapping[TopicPartition, int] = self.site.committed(self.group)
        return {partition.partition: offset for partition, offset in found.items() if partition.topic == self.source}

    def wait_committed(self, expected: Mapping[int, int]) -> None:
        """Wait until exactly this is committed of these partitions."""
        self.site.wait_until(lambda: expected.items() <= self.committed.items(), f"the commit of {expected}")

    @property
    def members(self) -> int:
        """How many members the group has, as the broker says."""
        admin = AdminClient({"bootstrap.servers": self.site.kafka.bootstrap_servers})
        return len(admin.describe_consumer_groups([self.group])[self.group].result(60).members)

    def reasons(self) -> list[str]:
        """Return why each dead letter is one."""
        topic = f"{self.source}.dlq"
        known = [each.name for each in asyncio.run(self.site.admin.list_topics())]
        dead_letters = self.site.records(topic) if topic in known else []
        return [(dict(each.headers)["headrace.dlq.reason"] or b"").decode() for each in dead_letters]
