"""A replay job: one run over a window of a topic, to a consumer's backend, a function or another topic.

Its progress is saved with the job. A redrive to a consumer is the same job over dead letters; it saves them as
completed.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.dead_letter import origin_of, redriven_count, restored
from headrace.delivery.outcomes import DeadLetterWriter, Destination, Outcome, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import DestinationUnavailable, InvalidRequest
from headrace.kafka import Admin, Lease, read_records
from headrace.records import Committed, Produce, Record, TopicPartition
from headrace.runs.dead_letters.completed_offsets import CompletedOffsets, dead_letter_lease
from headrace.runs.destinations import CopyToTopic, ReplayDeadLetters, RestoredDelivery
from headrace.runs.jobs import Job, SaveProgress
from headrace.runs.selection import Matcher, Selection, Window
from headrace.runs.window_run import DRAIN_SECONDS, Limits, Progress, Run, WindowSource
from headrace.runtime import Clock
from headrace.runtime.failpoints import reach

TO_TOPIC_FLOW = FlowControl()
_TO_TOPIC = DeliveryConfig(batch=BatchConfig(max_records=500, max_bytes=1_048_576))
_MAPS_CHARACTERS = 500_000
_COUNTED = ("delivered", "dead_letters", "discarded", "filtered", "skipped", "redeliveries", "refusals")
_NOT_OUTCOMES = ("redeliveries", "refusals")


ConsumerOf = Callable[[Mapping[str, str]], RunningConsumer | None]
"""Returns the consumer of a name as it is now; None for a topic, or if it does not run here."""


def repeats_of(flow: FlowControl) -> int:
    """Return how many records a kill may repeat: with a smaller number, saving progress would cost more."""
    return 2 * flow.max_records


class ReplaySpec(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"
):
    """What is replayed, and where to. A job with fields that this version does not know does not run here."""

    window: Window
    to: dict[str, str]
    """`consumer`, `function` or `topic`, and its name."""
    rate: float | None = None
    """Records per second at most."""
    last_retry: bool = False
    dead_letters: bool = False
    """Whether they are dead letters: a consumer or function gets their original records."""
    select: Selection | None = None
    """Of a redrive: only these dead letters, and only those that are left; they are saved as completed."""
    redrives_below: int | None = None
    """Of a redrive: only dead letters whose record was redriven less often than this."""
    repeats_at_most: int
    """How many records a kill of the process repeats at most."""


class NothingSelected(InvalidRequest):
    """No dead letter that is left is selected."""


class RunContext(NamedTuple):
    """What runs use of the process."""

    admin: Admin
    produce: Produce
    audited_produce: Produce
    """The same, with audit events."""
    clock: Clock


class ReplayJob:
    """See `JobRunner`."""

    def __init__(
        self,
        job: Job,
        spec: ReplaySpec,
        context: RunContext,
        target_of: ConsumerOf,
        *,
        drain_seconds: float = DRAIN_SECONDS,
        on_begin: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare; without a target the records go to a topic.

        `on_begin` is called when the delivery begins; see `Run` for `drain_seconds`.
        """
        target = target_of(spec.to)
        self._job, self._spec, self._target, self._target_of = job, spec, target, target_of
        self._context = context._replace(admin=target.admin) if target else context
        self._matcher = Matcher(spec.select) if spec.select is not None else None
        self._run = Run(context.clock, self._check, drain_seconds=drain_seconds)
        self._on_begin = on_begin
        self._completed: CompletedOffsets | None = None
        self._lease: Lease | None = None
        self._restored: RestoredDelivery | None = None
        self._earlier: dict[str, int] = {}

    async def run(self, progress: Mapping[str, Any], save_progress: SaveProgress, stop: asyncio.Event) -> str:
        spec, context = self._spec, self._context
        found = await context.admin.topic_ids([spec.window.topic], "Read")
        if found.get(spec.window.topic) != spec.window.topic_id:
            raise InvalidRequest(f"topic {spec.window.topic} was deleted or created again: the window no longer exists")
        self._earlier = dict(progress.get("counts", {}))
        if not progress:
            await save_progress({"done": 0, "total": spec.window.total})
        if spec.select is None:
            return await self._deliver(progress, save_progress, stop)
        topic = spec.window.topic
        async with dead_letter_lease(context.admin, topic, context.clock) as self._lease:
            self._completed = CompletedOffsets(context.admin, topic)
            await self._completed.prepare(context.produce)
            await self._completed.load(settled=True)
            return await self._deliver(progress, save_progress, stop)

    async def _deliver(self, progress: Mapping[str, Any], save_progress: SaveProgress, stop: asyncio.Event) -> str:
        spec, context, target = self._spec, self._context, self._target
        self._on_begin()
        pump = await self._pump()
        source = WindowSource(
            pump,
            self._starts(progress),
            spec.window.ends,
            read=functools.partial(read_records, context.admin.config),
            start_offsets=context.admin.start_offsets,
            limits=Limits(target.flow if target else TO_TOPIC_FLOW, spec.repeats_at_most, spec.rate),
            clock=context.clock,
        )

        async def save(reached: Progress) -> bool:
            reach("replay.save")
            await self._save_ended(reached)
            counts = pump.counts.read()
            reached = reached._replace(counts={**reached.counts, **{name: counts[name] for name in _NOT_OUTCOMES}})
            saved = await save_progress(self._to_save(reached), message=pump.readiness().reason)
            if saved:
                reach("replay.saved")
            return saved

        finished = await self._run.deliver(pump, source, save, stop)
        return self._message(source.progress, resumed=bool(progress)) if finished else ""

    def _starts(self, progress: Mapping[str, Any]) -> dict[TopicPartition, Committed]:
        """Return where each partition starts: after the progress, and after dead letters that are completed."""
        reached, starts = progress.get("positions", {}), {}
        for number, (start, end) in self._spec.window.ranges.items():
            first = start
            if self._completed and self._restored and str(number) not in reached:
                first = self._completed.first_left(number, start, end)
                self._restored.passed += first - start
            starts[TopicPartition(self._spec.window.topic, number)] = Committed(*reached.get(str(number), (first,)))
        return starts

    def _check(self) -> None:
        if self._target_of(self._spec.to) is not self._target:
            raise DestinationUnavailable(
                "the target was changed or removed: the job resumes when the target runs again"
            )

    async def _save_ended(self, reached: Progress) -> None:
        if self._restored:
            completed = self._restored.completed(reached.positions)
            if self._completed and self._lease:
                await self._lease.check()
                await self._completed.save(self._context.produce, completed)
            self._restored.forget(completed)

    def _to_save(self, reached: Progress) -> dict[str, Any]:
        positions = {str(p.partition): list(at) for p, at in reached.positions.items()}
        if sum(len(at.metadata) for at in reached.positions.values()) > _MAPS_CHARACTERS:
            positions = {number: [offset, ""] for number, (offset, _) in positions.items()}
        left = sum(end - reached.positions[p].offset for p, end in self._spec.window.ends.items())
        total = self._spec.window.total
        return {"positions": positions, "counts": self._counts(reached), "total": total, "done": total - left}

    def _counts(self, reached: Progress) -> dict[str, int]:
        counts = {name: self._earlier.get(name, 0) + reached.counts.get(name, 0) for name in _COUNTED}
        if self._restored:
            counts["passed"] = self._earlier.get("passed", 0) + self._restored.passed
            if unproved := self._earlier.get("unproved", 0) + self._restored.unproved:
                counts["unproved"] = unproved
        return counts

    def _message(self, reached: Progress, *, resumed: bool) -> str:
        """Return the remark on the finished job; raises InvalidRequest for a redrive that selected nothing."""
        counts, topic = self._counts(reached), self._spec.window.topic
        unproved = counts.pop("unproved", 0)  # "passed" includes them
        nothing = counts.get("passed") == sum(counts.values())
        if self._spec.select is not None and nothing and not (resumed or unproved):
            raise NothingSelected(f"nothing matches: no dead letter left in {topic} is selected")
        gone = self._spec.window.total - sum(count for name, count in counts.items() if name not in _NOT_OUTCOMES)
        plural = "offset of the window holds" if gone == 1 else "offsets of the window hold"
        notes = [f"{gone} {plural} no record any more (expired, compacted, aborted, or a marker)"] if gone > 0 else []
        if unproved:
            notes.append(f"{unproved} dead letters left: they name an origin that the consumer does not read")
        return "; ".join(notes)

    async def _pump(self) -> Pump:
        spec, target, job = self._spec, self._target, self._job.id
        destination: Destination
        dead_letters: DeadLetterWriter | None = None
        if target is None:
            topic = spec.to["topic"]
            partitions = len((await self._context.admin.describe_topic(topic, "Write")).partitions)
            destination = CopyToTopic(topic, partitions, self._context.audited_produce, job)
            delivery, group = _TO_TOPIC, job
        else:
            destination, delivery, group = target.destination, target.delivery, target.group
            dead_letters = target.dead_letters
            if spec.dead_letters:
                destination = self._restored = RestoredDelivery(
                    destination, self._selects, target.is_origin, target.pump.epoch_of
                )
        # Retry topics keep a failed record from delaying the live records behind it. A replay has none.
        retry = delivery.retry.model_copy(
            update={"topics": [], "keep_key_order": False, "last_retry": spec.last_retry or delivery.retry.last_retry}
        )
        return Pump(
            f"job {job}",
            group,
            destination,
            ReplayDeadLetters(dead_letters, job, restores=self._restored is not None, fail=self._run.fail),
            delivery=delivery.model_copy(update={"retry": retry}),
            clock=self._context.clock,
            shares_with=target.pump if target else None,
            hooks=PumpHooks(on_completed=self._on_completed, replay=job),
        )

    def _on_completed(
        self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
    ) -> None:
        """Report completed records as those of the target; of dead letters, the original records."""
        if self._target and (on_completed := self._target.pump.hooks.on_completed):
            records = [restored(record) for record in records] if self._restored else records
            on_completed(records, size_bytes, how, replies, replay)

    def _selects(self, record: Record) -> bool:
        headers = record.headers
        origin = origin_of(headers)
        if origin is None or (self._completed and self._completed.is_completed(record.partition, record.offset)):
            return False
        if not self._matcher:
            return self._target is None or origin.group == self._target.group  # other groups may use the topic, too
        limit = self._spec.redrives_below
        if limit is not None and redriven_count(headers) >= limit:
            return False
        return self._matcher.matches(record, origin, headers)
