"""The numbers of the workers of a function's trigger, under Nuclio's names and as a histogram.

Triggers that share workers share all series except those of handled events.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial

from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.trigger import Trigger
from headrace.runtime import Service
from headrace.runtime.gauge_registry import DurationHistogram, Measured

_Labels = Mapping[str, str]
_NUCLIO = "nuclio_processor_"


class WorkerMetrics:
    """Counts the work of one pool of workers."""

    def __init__(self, spec: FunctionSpec, triggers: Sequence[Trigger], name: str, workers: int) -> None:
        """Begin at 0; `name` is that of the trigger or of the shared allocator."""
        self.handled = {trigger.name: Counter[str]() for trigger in triggers}
        """Calls by trigger and result: `success` or `failure`."""
        self.allocations = Counter[str]()
        """Choices of a worker by their result."""
        self._idle_percent = 0.0
        self._event = DurationHistogram()
        self._wait_seconds = 0.0
        self._milliseconds = [0.0] * workers
        self._events = [0] * workers
        self._own = {"kind": "function", "consumer": f"{spec.name}.{name}"}
        self._nuclio = {"namespace": spec.namespace, "function": spec.name, "trigger_kind": triggers[0].kind}
        self._pool = {**self._nuclio, "trigger_id": name}

    def allocated(self, waited_seconds: float, waited: bool, idle_part: float) -> None:
        """Count the choice of a worker, and the part of the workers that was idle before."""
        self.allocations["success_after_wait" if waited else "success_immediate"] += 1
        self._idle_percent += 100 * idle_part
        self._wait_seconds += waited_seconds

    def worked(self, worker: int, events: int, seconds: float) -> None:
        """Count the events of a frame by their time in the handler."""
        self._event.add(seconds / events, events)
        self._milliseconds[worker] += seconds * 1000
        self._events[worker] += events

    def publish(self, service: Service, more: Mapping[str, Callable[[], float]]) -> None:
        """Publish every number until a service stops, and further ones by the name of their metric."""
        for metric, labels, read in [*self._series(), *((metric, self._own, read) for metric, read in more.items())]:
            service.publish(metric, read, **labels)

    def _series(self) -> Iterator[tuple[str, _Labels, Callable[[], Measured]]]:
        yield "headrace_function_event_seconds", self._own, partial(copy, self._event)
        for name, handled in self.handled.items():
            for result in ("success", "failure"):
                labels = {**self._nuclio, "trigger_id": name, "result": result}
                yield f"{_NUCLIO}handled_events_total", labels, partial(handled.__getitem__, result)
        prefix = f"{_NUCLIO}handled_events_duration_milliseconds"
        for worker in range(len(self._events)):
            labels = {**self._pool, "worker_index": str(worker)}
            yield f"{prefix}_sum", labels, partial(self._milliseconds.__getitem__, worker)
            yield f"{prefix}_count", labels, partial(self._events.__getitem__, worker)
        prefix = f"{_NUCLIO}worker_allocation"
        for result in ("success_immediate", "success_after_wait", "error_timeout"):
            yield f"{prefix}_total", {**self._pool, "result": result}, partial(self.allocations.__getitem__, result)
        yield f"{prefix}_count", self._pool, self.allocations.total
        yield f"{prefix}_wait_duration_milliseconds_sum", self._pool, lambda: self._wait_seconds * 1000
        yield f"{prefix}_workers_available_percentage", self._pool, lambda: self._idle_percent
