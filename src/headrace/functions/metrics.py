"""The numbers of the workers of a function's trigger, under Nuclio's names and as histograms.

Triggers that share their workers share all series but those of handled events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial

from headrace.functions.spec import AnyTrigger, FunctionSpec
from headrace.lifecycle.gauge_registry import DurationHistogram, Measured, register_gauge, unregister_gauge

_RESULTS = ("success", "failure")
_ALLOCATIONS = ("success_immediate", "success_after_wait", "error_timeout")


class WorkerMetrics:
    """Counts what the workers of one trigger do, or those that several share."""

    def __init__(self, spec: FunctionSpec, triggers: Sequence[AnyTrigger], name: str, workers: int) -> None:
        """Begin at 0; `name` is that of the trigger or of the shared allocator."""
        self.handled = {trigger.name: Counter[str]() for trigger in triggers}
        """Calls by trigger and result: `success` or `failure`."""
        self.allocations = Counter[str]()
        """Choices of a worker by their result."""
        self._idle_percent = 0.0
        self._event, self._frame, self._wait = DurationHistogram(), DurationHistogram(), DurationHistogram()
        self._worker_seconds, self._worker_events = [0.0] * workers, [0] * workers
        self._own = {"kind": "function", "consumer": f"{spec.name}.{name}"}
        self._nuclio = {"namespace": spec.namespace, "function": spec.name}
        self._names = {name: triggers[0].kind} | {trigger.name: trigger.kind for trigger in triggers}
        self._pool = name
        self._registered: list[tuple[str, Mapping[str, str]]] = []

    def allocated(self, waited_seconds: float, waited: bool, idle_part: float) -> None:
        """Count the choice of a worker, and which part of the workers was idle before it."""
        self.allocations["success_after_wait" if waited else "success_immediate"] += 1
        self._idle_percent += 100 * idle_part
        self._wait.add(waited_seconds)

    def answered(self, seconds: float) -> None:
        """Count a frame by its time since a worker was chosen."""
        self._frame.add(seconds)

    def worked(self, worker: int, events: int, seconds: float) -> None:
        """Count the events of a frame by their time in the handler."""
        self._event.add(seconds / events, events)
        self._worker_seconds[worker] += seconds
        self._worker_events[worker] += events

    def publish(self, more: Mapping[str, Callable[[], float]]) -> None:
        """Publish every number, and further ones by the name of their metric."""
        for histogram, name in ((self._event, "event"), (self._frame, "frame"), (self._wait, "wait")):
            self._register(f"headrace_function_{name}_seconds", partial(copy, histogram), self._own)
        for metric, read in more.items():
            self._register(metric, read, self._own)
        for name, counts in self.handled.items():
            for result in _RESULTS:
                metric = "nuclio_processor_handled_events_total"
                self._register(metric, partial(counts.__getitem__, result), self._of(name), result=result)
        pool = self._of(self._pool)
        for worker in range(len(self._worker_events)):
            prefix, index = "nuclio_processor_handled_events_duration_milliseconds_", str(worker)
            milliseconds = partial(lambda number: self._worker_seconds[number] * 1000, worker)
            self._register(prefix + "sum", milliseconds, pool, worker_index=index)
            self._register(prefix + "count", partial(self._worker_events.__getitem__, worker), pool, worker_index=index)
        prefix = "nuclio_processor_worker_allocation_"
        for result in _ALLOCATIONS:
            self._register(f"{prefix}total", partial(self.allocations.__getitem__, result), pool, result=result)
        self._register(f"{prefix}count", self.allocations.total, pool)
        self._register(f"{prefix}wait_duration_milliseconds_sum", lambda: self._wait.seconds * 1000, pool)
        self._register(f"{prefix}workers_available_percentage", lambda: self._idle_percent, pool)

    def withdraw(self) -> None:
        """Publish nothing of it any longer."""
        for metric, labels in self._registered:
            unregister_gauge(metric, **labels)
        self._registered.clear()

    def _of(self, name: str) -> Mapping[str, str]:
        return {**self._nuclio, "trigger_id": name, "trigger_kind": self._names[name]}

    def _register(self, metric: str, read: Callable[[], Measured], labels: Mapping[str, str], **more: str) -> None:
        register_gauge(metric, read, **labels, **more)
        self._registered.append((metric, {**labels, **more}))
