"""The status of a pipeline's run, and the offsets that show its progress to Kafka's tools."""

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final

from headrace.errors import HeadraceError
from headrace.records import TopicPartition
from headrace.runtime import Clock
from headrace.runtime.gauge_registry import register_gauge
from headrace_pipelines import driver_protocol
from headrace_pipelines.report import FlowStatus, State

log = logging.getLogger(__name__)

_GAUGES: Final = {
    "state_rows": "headrace_flow_state_rows",
    "batch_seconds": "headrace_flow_batch_seconds",
    "lag_records": "headrace_flow_lag_records",
}
_SUMS: Final = ("input_records", "corrupt_records", "tombstone_records", "late_records", "dropped_rows")
"""Counts of a flow that its micro-batches add to."""
_LATEST: Final = ("batch_id", "watermark", "records_per_second", *_GAUGES)
"""Values of a flow that are those of its last micro-batch that has them."""


class RunStatus:
    """A whole run."""

    def __init__(self, pipeline: str, groups: Mapping[str, str], sinks: Mapping[str, str]) -> None:
        self.pipeline = pipeline
        self.state: State = "starting"
        self.reason = "not started"
        """Why the run is not ready, in one sentence; empty when it is."""
        self.starts = 0
        self.waits_for_folder = False
        """Whether the driver waits for another process."""
        self.flows = {name: FlowStatus(group=group, sink=sinks[name]) for name, group in groups.items()}
        self.on_flow: Callable[[str, str], None] = lambda flow, group: None
        """Called with a flow that is added, and its group."""

    def add_flow(self, flow: str, group: str) -> None:
        """Add a flow that was not known at the start."""
        self.flows[flow] = FlowStatus(group=group)
        self.on_flow(flow, group)

    def driver_started(self, *, planned: bool = False) -> None:
        """Count the start of a driver process; a `planned` one leaves the run ready."""
        self.starts += 1
        self.waits_for_folder = False
        self.become("starting", "" if planned else "Spark is starting")
        for flow in self.flows.values():
            flow.state = "starting"

    def become(self, state: State, reason: str = "") -> None:
        """Set the state of the run as a whole, and why it is not ready."""
        self.state = state
        self.reason = reason
        if state in ("waiting", "failed", "paused", "stopped"):
            for flow in self.flows.values():
                if flow.state != "finished":
                    flow.state = state

    def apply(self, event: driver_protocol.AnyEvent) -> None:
        """Apply an event of the driver."""
        self.waits_for_folder = isinstance(event, driver_protocol.FolderInUse)
        match event:
            case driver_protocol.FolderInUse(owner=owner):
                self.reason = f"{owner} runs this pipeline with the same state_dir: stop it, or wait for its end"
            case driver_protocol.SessionReady():
                self.reason = self.reason and "its flows are being started"
            case driver_protocol.FlowRunning(flow=name):
                self.flows[name].state = "running"
            case driver_protocol.FlowFinished(flow=name):
                self.flows[name].state = "finished"
            case driver_protocol.FlowFailed(flow=name, error=error, text=text):
                self.flows[name].state = "failed"
                self.flows[name].last_error = f"{error}: {text}"
                log.error("pipeline %s: %s. Its other flows continue", self.pipeline, self._failures())
            case driver_protocol.FlowProgress(flow=name):
                self._progress(self.flows[name], event)
            case driver_protocol.Failed(part=part):
                if (flow := self.flows.get(part.removeprefix("flows."))) is not None:
                    flow.last_error = f"{event.error}: {event.text}"
        states = {flow.state for flow in self.flows.values()}
        if states == {"finished"}:
            self.become("finished")
        elif "running" in states and states <= {"running", "finished", "failed"}:
            self.become("running", self._failures())

    @property
    def restarts(self) -> int:
        """How often the driver was started again."""
        return max(0, self.starts - 1)

    def _failures(self) -> str:
        """Return which flows have failed and why, while others run."""
        failed = (
            f"flow {name} failed: {flow.last_error}" for name, flow in self.flows.items() if flow.state == "failed"
        )
        return "; ".join(failed)

    def _progress(self, flow: FlowStatus, event: driver_protocol.FlowProgress) -> None:
        if event.corrupt_records and not flow.corrupt_records:
            count = f"{event.corrupt_records} of {event.input_records} records"
            what = "that do not match the schema of their source; more will only be counted (corrupt_records)"
            log.warning("pipeline %s, flow %s: dropped %s %s", self.pipeline, event.flow, count, what)
        for name in _SUMS:
            setattr(flow, name, getattr(flow, name) + getattr(event, name))
        for name in _LATEST:
            if (value := getattr(event, name)) is not None:
                setattr(flow, name, value)
        flow.received_per_second = event.received_per_second
        flow.worked_seconds += event.batch_seconds or 0
        labels = {"pipeline": self.pipeline, "flow": event.flow}
        for name, metric in _GAUGES.items():
            if getattr(flow, name) is not None:
                register_gauge(metric, functools.partial(getattr, flow, name), **labels)
        with contextlib.suppress(ValueError):  # a year that Python does not have, from a wrong unit of time
            seconds = datetime.fromisoformat(event.watermark or "").timestamp()
            register_gauge("headrace_flow_watermark_seconds", lambda: seconds, **labels)
        for rule, rows in event.broken_rules.items():
            flow.broken_rules[rule] = flow.broken_rules.get(rule, 0) + rows


PublishOffsets = Callable[[str, Mapping[TopicPartition, int]], Awaitable[None]]
"""Sets the committed offsets of a group: group, partition to the next offset to read."""

_INTERVAL_SECONDS = 1.0


class OffsetPublisher:
    """Publishes the newest positions of each group at most once a second."""

    def __init__(self, publish: PublishOffsets, clock: Clock) -> None:
        self._publish = publish
        self._clock = clock
        self._pending: dict[str, dict[TopicPartition, int]] = {}
        self.problem = ""
        """Why the newest positions are not published; empty if they are."""

    def add(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Take new positions of a group: topic to partition to the next offset to read."""
        pending = self._pending.setdefault(group, {})
        for topic, partitions in positions.items():
            for partition, offset in partitions.items():
                pending[TopicPartition(topic, partition)] = offset

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._clock.sleep(_INTERVAL_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Publish new positions. A failure is logged once, and the positions are published later."""
        problem = ""
        for group, pending in list(self._pending.items()):
            sent = dict(pending)
            if not sent:
                continue
            try:
                await self._publish(group, sent)
            except HeadraceError as cause:
                if not self.problem and not problem:
                    log.warning(
                        "failed to publish offsets of group %s, so its lag is stale; will retry: %s", group, cause
                    )
                problem = cause.description
                if cause.retriable:  # the other groups would wait for Kafka too
                    break
                continue
            # Only what was sent: newer positions may have arrived, and a drain may publish at the same time.
            for where, offset in sent.items():
                if pending.get(where) == offset:
                    del pending[where]
        self.problem = problem
