"""Watches the progress of flows: a stalled flow is reported, and after twice the time its driver is replaced."""

import msgspec

from headrace.runtime import Clock
from headrace_pipelines import driver_protocol
from headrace_pipelines.spark_project import SparkProject
from headrace_pipelines.spec import PipelineSpec
from headrace_pipelines.status import RunStatus

_PYTHON_ATTEMPTS = 5
_PYTHON_ADVICE = "Correct the code, filter such records out, or give Python more memory; then resume the pipeline"
_START_SECONDS = 300.0
"""A start counts as stalled after this time at the earliest: Java, sources and checkpoints may need minutes."""


class FlowWatch:
    """What the flows of one driver have done, and since when they have done nothing."""

    def __init__(self, spec: PipelineSpec, status: RunStatus, clock: Clock) -> None:
        # Settings
        self._spec = spec
        self._status = status
        self._clock = clock
        batch = spec.trigger.checkpoint_seconds if spec.trigger.realtime else spec.trigger.interval_seconds
        self._limit_seconds = spec.driver.stall_seconds + batch
        # This driver
        self._moved: dict[str, float] = {}
        """When each flow last made progress; while it starts, when a part of the start was last completed."""
        self._began: dict[str, float] = {}
        """When each flow began to run; without those that have reported since."""
        self.stall = ""
        """Which flow makes no progress, and since when; empty if all do."""
        # Over drivers
        self._python_failures: dict[str, int] = {}
        """How often Python code of each part has failed since the last micro-batch of its flow."""

    def driver_started(self) -> None:
        """Begin to watch every flow."""
        self._moved = dict.fromkeys(self._spec.running, self._clock.monotonic())

    def driver_ended(self) -> None:
        """Watch nothing until the next driver."""
        self._moved.clear()
        self._began.clear()

    def first_batch_seconds(self, flow: str) -> float | None:
        """Return for how long a flow has been at its first micro-batch; None if it is not."""
        began = self._began.get(flow)
        return None if began is None else self._clock.monotonic() - began

    def on_event(self, event: driver_protocol.AnyEvent) -> None:
        """Apply an event of the driver."""
        if isinstance(event, driver_protocol.FlowRunning) and not isinstance(self._spec, SparkProject):
            self._began[event.flow] = self._clock.monotonic()
        elif isinstance(event, driver_protocol.FlowProgress):
            self._began.pop(event.flow, None)
            self._python_failures.pop(f"flows.{event.flow}", None)
        match event:
            case driver_protocol.FolderInUse():  # another process may have it for as long as it lives
                self._moved.clear()
            case driver_protocol.SessionReady():
                self.driver_started()
            case driver_protocol.FlowFinished(flow=name) | driver_protocol.FlowFailed(flow=name):
                self._moved.pop(name, None)
                self._began.pop(name, None)
            case driver_protocol.FlowProgress(flow=name, input_records=0, lag_records=int(lag)) if (
                lag and name in self._moved
            ):
                pass  # there are records, and none was read
            case (
                driver_protocol.FlowRunning(flow=name)
                | driver_protocol.FlowProgress(flow=name)
                | driver_protocol.FlowWorking(flow=name)
            ):
                self._moved[name] = self._clock.monotonic()
                if isinstance(event, driver_protocol.FlowRunning):  # flows are started one after the other
                    self._moved |= {each: self._moved[name] for each in self._moved if not self._runs(each)}

    def look(self) -> bool:
        """Update `stall`. Returns whether it has lasted long enough to replace the driver."""
        now = self._clock.monotonic()
        limits = {
            name: self._limit_seconds if self._runs(name) else max(self._limit_seconds, _START_SECONDS)
            for name in self._moved
        }
        late, flow = max((((now - at) / limits[name], name) for name, at in self._moved.items()), default=(0.0, ""))
        if late < 1:
            self.stall = ""
            return False
        seconds = f"{late * limits[flow]:.0f} s"
        if self._runs(flow):
            self.stall = f"flow {flow} has made no progress for {seconds}: no micro-batch and no task has completed"
        else:
            self.stall = f"flow {flow} is still starting, without progress for {seconds}"
        return late >= 2

    def bounded(self, failure: driver_protocol.Failed) -> driver_protocol.Failed:
        """Return the failure; one of Python code is permanent after too many attempts at the same micro-batch.

        Each further attempt could write the rows of the micro-batch again.
        """
        if failure.error != driver_protocol.PYTHON_FAILED:
            return failure
        failures = self._python_failures[failure.part] = self._python_failures.get(failure.part, 0) + 1
        if failures < _PYTHON_ATTEMPTS:
            return failure
        del self._python_failures[failure.part]
        text = f"{failure.text}\nIt failed {failures} times in the same micro-batch. {_PYTHON_ADVICE}"
        return msgspec.structs.replace(failure, text=text, retriable=False)

    def _runs(self, flow: str) -> bool:
        return self._status.flows[flow].state == "running"
