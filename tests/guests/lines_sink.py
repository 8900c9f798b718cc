"""A sink of another package: a file with a line of JSON for each row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from headrace_pipelines.sinks.sink import BatchWriter, FlowFacts, FlowInDriver, Sink


class LinesSink(Sink):
    """A file that grows by a line for each row."""

    kind: ClassVar = "lines"

    lines: str
    """File, relative to the pipeline file."""

    @property
    def guarantee(self) -> str:
        return "at least once, line by line"

    @property
    def in_driver(self) -> bool:
        return True

    def problems(self, flow: FlowFacts) -> Iterator[str]:
        yield from super().problems(flow)
        if self.mode != "append":
            yield "lines are written once: use mode: append"

    def writer(self, rows: Any, flow: FlowInDriver, batches: BatchWriter | None) -> Any:
        file = Path(flow.path(self.lines))

        def write(batch: Any, number: int) -> None:
            with file.open("a") as stream:
                stream.writelines(f"{row}\n" for row in batch.toJSON().collect())

        return rows.writeStream.foreachBatch(write)
