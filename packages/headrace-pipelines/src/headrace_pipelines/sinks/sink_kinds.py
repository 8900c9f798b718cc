"""The kinds of sinks: those of this package, and those of other packages by their entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.config.section import any_of
from headrace.extras import by_key, kinds_of_guests
from headrace_pipelines.sinks.console_sink import ConsoleSink
from headrace_pipelines.sinks.delta_sink import DeltaSink
from headrace_pipelines.sinks.file_sink import FileSink
from headrace_pipelines.sinks.format_sink import FormatSink
from headrace_pipelines.sinks.iceberg_sink import IcebergSink
from headrace_pipelines.sinks.memory_sink import MemorySink
from headrace_pipelines.sinks.postgres_sink import PostgresSink
from headrace_pipelines.sinks.python_sink import PythonSink
from headrace_pipelines.sinks.sink import Sink
from headrace_pipelines.sinks.topic_sink import KafkaSink

GROUP: Final = "headrace.pipelines.sinks"
"""The group of entry points by which another package registers a sink: `NAME = "package.module:Class"`."""
_OWN: Final = (
    KafkaSink,
    FileSink,
    PostgresSink,
    DeltaSink,
    IcebergSink,
    ConsoleSink,
    MemorySink,
    FormatSink,
    PythonSink,
)
"""One line for each sink of this package. The first is what a section without any of their keys is read as.
`files` has a key `format` too, so it stands before it."""


def registered() -> dict[str, type[Sink]]:
    """Return each kind by the key that only it has: those of this package, then those of entry points.

    Raises:
        EnvironmentProblem: An entry point cannot be loaded, or is not a new kind of sink.
    """
    kinds: tuple[type[Sink], ...] = (*_OWN, *kinds_of_guests(GROUP, Sink, "sink"))
    return by_key(((kind.kind, kind) for kind in kinds), "sink")


SINKS: Final = registered()
"""Each kind by the key that only it has; looked for once per process."""

if TYPE_CHECKING:
    AnySink = Sink
else:
    AnySink = any_of(SINKS)
