"""Progress of Spark's queries, as events of the driver."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pyspark import StatusTracker
from pyspark.sql import Row
from pyspark.sql.streaming.query import StreamingQuery

from headrace_pipelines.driver.kafka_rows import FAILED, FAILED_CALLS, RULES
from headrace_pipelines.driver.late_rows import LATE
from headrace_pipelines.driver_protocol import DriverPlan, FlowProgress, FlowRunning, FlowWorking, SendEvent
from headrace_pipelines.sinks.sink import BatchWriter

_GETTING_OFFSETS = "Getting offsets"
_SUMS = ("numInputRows", "inputRowsPerSecond", "processedRowsPerSecond")
"""Numbers of a report that it also has for each source."""


class ProgressReader:
    """Reports a query's progress without missing a micro-batch."""

    def __init__(
        self, plan: DriverPlan, query: StreamingQuery, sink: BatchWriter | None, send: SendEvent, flow: str = ""
    ) -> None:
        """Read the progress of a query, which has the name of its flow unless another one is given."""
        self._spec = plan.spec
        self.query = query
        self._flow = flow or query.name
        self._sink = sink
        self._send = send
        self._newest = ""
        self._running = False
        self._work = -1, 0
        """The newest job, and how many of its tasks have completed."""
        self.batch_id = -1
        """The last micro-batch that completed; -1 if none has."""
        self._lag: int | None = None
        """Records in Kafka that it had not read."""

    @property
    def between_batches(self) -> bool:
        """Whether no micro-batch runs; one that only gets offsets from Kafka has not begun."""
        return not self.query.status["isTriggerActive"] or self._message.startswith(_GETTING_OFFSETS)

    @property
    def failure(self) -> Exception | None:
        """Why the query has ended; None if it has read everything."""
        failed = self.query.exception()
        if self._spec.driver.remote and not failed and (self._lag or not self._spec.trigger.once):
            return ConnectionError("the Spark Connect server has ended the flow")  # as it does when it ends
        return (failed and self._sink and self._sink.failure) or failed

    @property
    def _message(self) -> str:
        return str(self.query.status["message"])

    def report(self) -> bool:
        """Report once that reading has begun, and each completed micro-batch; return if one has completed."""
        if self._sink:
            self._sink.poll(self.batch_id)
        before, last = self._newest, self.query.lastProgress
        if last is not None and last["timestamp"] != before:
            # Spark keeps the last hundred, and polls are far more frequent than a hundred batches.
            recent = reversed(self.query.recentProgress)  # not compared by time, because clocks are set back
            for progress in reversed([*itertools.takewhile(lambda each: each["timestamp"] != before, recent)]):
                self._newest = progress["timestamp"]
                event = to_event(self._flow, progress)
                self.batch_id, self._lag = event.batch_id, event.lag_records
                self._send(event)
        if not self._running and (self._newest or not self._message.startswith(("Initializing", _GETTING_OFFSETS))):
            self._running = True
            self._send(FlowRunning(self._flow))
        return self._newest != before

    def report_work(self, tracker: StatusTracker) -> None:
        """Report it if tasks of the present micro-batch have completed since the last call."""
        job = max(tracker.getJobIdsForGroup(str(self.query.runId)), default=-1)
        known = tracker.getJobInfo(job)
        stages = [tracker.getStageInfo(stage) for stage in known.stageIds] if known else []
        work = job, sum(stage.numCompletedTasks for stage in stages if stage)
        if work != self._work:
            self._work = work
            self._send(FlowWorking(self._flow))


def to_event(flow: str, progress: Mapping[str, Any]) -> FlowProgress:
    """Return the event for a progress report of Spark. Source: Spark, StreamingQueryProgress."""
    observed = {name: _counts(row) for name, row in progress["observedMetrics"].items()}
    rules = sum((Counter(observed.get(kind, {})) for kind in (RULES, FAILED, FAILED_CALLS)), Counter[str]())
    sources = [row for name, row in observed.items() if name not in (RULES, FAILED, FAILED_CALLS, LATE)]
    topics = [source for source in progress["sources"] if source["description"].startswith("Kafka")]
    positions = _positions(topics)
    if len(sources) < len(topics):  # a source that is read twice is observed once, so its records count once
        topics = [*{topic["description"]: topic for topic in reversed(topics)}.values()]
        others = [source for source in progress["sources"] if not source["description"].startswith("Kafka")]
        progress = {**progress, **dict.fromkeys(_SUMS), "sources": [*topics, *others]}
    operators = progress["stateOperators"]
    idle = "addBatch" not in progress["durationMs"]  # every ten seconds without records, Spark reports the next batch
    return FlowProgress(
        flow=flow,
        began=progress["timestamp"],
        batch_id=progress["batchId"] - idle,
        input_records=_sum(progress, "numInputRows") or 0,
        records_per_second=_sum(progress, "processedRowsPerSecond") or 0.0,
        corrupt_records=sum(row["corrupt"] for row in sources),
        tombstone_records=sum(row["tombstones"] for row in sources),
        late_records=observed[LATE]["late"] if LATE in observed else 0,
        broken_rules=dict(rules),
        lag_records=_lag(topics) if topics else None,
        positions=positions,
        received_per_second=_sum(progress, "inputRowsPerSecond"),
        batch_seconds=None if idle else progress["durationMs"]["triggerExecution"] / 1000,
        dropped_rows=sum(each["numRowsDroppedByWatermark"] for each in operators),
        state_rows=sum(each["numRowsTotal"] for each in operators) if operators else None,
        state_bytes=sum(each["memoryUsedBytes"] for each in operators) if operators else None,
        watermark=(progress["eventTime"] or {}).get("watermark"),
    )


def _counts(row: Row) -> dict[str, int]:
    """Return observed counts by name; a Spark Connect server gives their values and their schema apart."""
    found = row.asDict()
    if isinstance(schema := found.get("schema"), dict):
        return {field["name"]: count for field, count in zip(schema["fields"], found["values"], strict=True)}
    return found


def _sum(progress: Mapping[str, Any], name: str) -> Any:
    """Return a number of a report; without its own sum, as a Spark Connect server reports it, that of the sources."""
    found = progress[name]
    return sum(each.get(name) or 0 for each in progress["sources"]) if found is None else found


def _positions(sources: list[Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    # A topic that is read twice has gone as far as its slower reader.
    found: dict[str, dict[int, int]] = {}
    for source in sources:
        for topic, partitions in _offsets(source, "endOffset").items():
            have = found.setdefault(topic, {})
            for partition, offset in partitions.items():
                have[partition] = min(offset, have.get(partition, offset))
    return found


def _lag(sources: list[Mapping[str, Any]]) -> int | None:
    lag = 0
    for source in sources:
        read, latest = _offsets(source, "endOffset"), _offsets(source, "latestOffset")
        if not latest:  # the offsets in Kafka are not known yet
            return None
        for topic, partitions in latest.items():
            lag += sum(max(0, end - read.get(topic, {}).get(number, 0)) for number, end in partitions.items())
    return lag


def _offsets(source: Mapping[str, Any], field: str) -> dict[str, dict[int, int]]:
    topics = json.loads(source[field]) or {}  # null before the first record
    return {topic: {int(number): offset for number, offset in found.items()} for topic, found in topics.items()}
