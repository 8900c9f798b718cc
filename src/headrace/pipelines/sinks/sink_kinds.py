"""The kinds of sinks: those of this package, and those of other packages by their entry points."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from headrace.config.section import any_of
from headrace.errors import EnvironmentProblem
from headrace.pipelines.sinks.console_sink import ConsoleSink
from headrace.pipelines.sinks.file_sink import FileSink
from headrace.pipelines.sinks.memory_sink import MemorySink
from headrace.pipelines.sinks.postgres_sink import PostgresSink
from headrace.pipelines.sinks.sink import Sink
from headrace.pipelines.sinks.topic_sink import KafkaSink

GROUP: Final = "headrace.pipelines.sinks"
"""The group of entry points by which another package registers a sink: `NAME = "package.module:Class"`."""
_OWN: Final = (KafkaSink, FileSink, PostgresSink, ConsoleSink, MemorySink)
"""One line for each sink of this package. The first is what a section without any of their keys is read as."""


def _kind_of_guest(point: EntryPoint) -> type[Sink]:
    package = point.dist.name if point.dist else point.module
    try:
        kind = point.load()
    except Exception as cause:  # boundary: the file of a guest may fail in any way
        text = f"the sink {point.name} of the package {package} cannot be loaded: {cause}"
        raise EnvironmentProblem(f"{text}. Update the package, or uninstall it") from cause
    if not (isinstance(kind, type) and issubclass(kind, Sink) and getattr(kind, "kind", "") in kind.model_fields):
        text = f"the sink {point.name} of the package {package} is not a subclass of Sink with a field of its kind"
        raise EnvironmentProblem(f"{text}: update the package, or uninstall it")
    return kind


def registered(points: Iterable[EntryPoint]) -> dict[str, type[Sink]]:
    """Return each kind by the key that only it has: those of this package, then those of entry points.

    Raises:
        EnvironmentProblem: An entry point cannot be loaded, or is not a new kind of sink.
    """
    found: dict[str, type[Sink]] = {kind.kind: kind for kind in _OWN}
    for point in sorted(points):
        kind = _kind_of_guest(point)
        if kind.kind in found and found[kind.kind] is not kind:
            raise EnvironmentProblem(f"two packages have a sink {kind.kind}: uninstall one of them")
        found[kind.kind] = kind
    return found


SINKS: Final = registered(entry_points(group=GROUP))
"""Each kind by the key that only it has; looked for once per process."""

if TYPE_CHECKING:
    AnySink = Sink
else:
    AnySink = any_of(SINKS)
