"""The sink `python`: a function of the user, which gets each micro-batch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar

from headrace.errors import PipelineInvalid
from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, Sink
from headrace_pipelines.sources import FunctionName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class PythonSink(Sink):
    """A function that gets each micro-batch as a DataFrame, and its number. A repeated one has the same number."""

    kind: ClassVar = "python"

    python: FunctionName
    """`module:function`: a function of a DataFrame and a number. The module is a file in the folder of the pipeline
    file, or installed. If it raises an error, Spark repeats the micro-batch."""

    @property
    def in_driver(self) -> bool:
        """The function runs in the driver."""
        return True

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return a writer that calls the function."""
        from headrace_pipelines.driver.python_names import imported

        function = imported(flow.path(""), self.python, "sink.python")
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if not callable(function) or any(is_kind(function) for is_kind in kinds):
            what = "is not a plain function, so a call would write nothing"
            raise PipelineInvalid(f"sink.python: {self.python} {what}: use def, without async and yield")

        def write(batch: DataFrame, number: int) -> None:
            try:
                function(batch, number)
            except SystemExit as cause:  # ends the thread whose response Spark awaits
                raise RuntimeError(f"{self.python} has called sys.exit") from cause

        return rows.writeStream.foreachBatch(write)
