"""One run of a replay: a window through a pump of its own, told to its job as it goes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.control.jobs import Job, Tell
from headrace.control.marks import Marks
from headrace.control.replay import Limits, Standing, WindowSource
from headrace.control.replay_targets import Produce, ReplayLetters, RestoredLetters, TopicDestination
from headrace.control.running_consumer import RunningConsumer
from headrace.control.selection import Matcher, Selection, Window
from headrace.delivery.context import PumpHooks
from headrace.delivery.dead_letter import origin_of, redriven_count, restored, write_all
from headrace.delivery.protocols import DeadLetterWriter, Destination
from headrace.delivery.pump import Pump
from headrace.errors import DestinationUnavailable, HeadraceError, InvalidRequest, LeaseTaken
from headrace.kafka import Admin, Lease, read_records
from headrace.lifecycle import Clock, Deadline, Service
from headrace.lifecycle.failpoints import reach
from headrace.records import Committed, Record, TopicPartition

TO_TOPIC_FLOW = FlowControl()
_TO_TOPIC = DeliveryConfig(batch=BatchConfig(max_records=500, max_bytes=1_048_576))
_LOOK_SECONDS, _SAVE_SECONDS = 0.2, 1.0
_DRAIN_SECONDS = 10.0
_LEASE_SECONDS = 20.0
_MAPS_CHARACTERS = 500_000
_TOLD = ("delivered", "dead_letters", "given_up", "skipped", "redeliveries", "refusals")
_NO_ENDINGS = ("redeliveries", "refusals")

TargetOf = Callable[[Mapping[str, str]], RunningConsumer | None]
"""Returns what is named, as it is now; None for a topic, or if it is not here."""


def repeats_of(flow: FlowControl) -> int:
    """Return how many records may come again after a kill: enough that writing progress down costs little."""
    return 2 * flow.max_records


class ReplaySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What is replayed, and where to."""

    window: Window
    to: dict[str, str]
    """`consumer`, `function` or `topic`, and its name."""
    rate: float | None = None
    """Records per second at most."""
    last_retry: bool = False
    letters: bool = False
    """Dead letters, which go to a consumer or function as the records they were."""
    select: Selection | None = None
    """A redrive: only these dead letters, and only those that have not ended; each that ends is marked."""
    redrives_below: int | None = None
    """Of a redrive: only dead letters whose record was redriven less often than this."""
    repeats_at_most: int
    """Records that come again at most when the process is killed."""


class Place(NamedTuple):
    """What a run of a replay takes from the process."""

    kafka: KafkaConfig
    admin: Admin
    produce: Produce
    noted: Produce
    """The same, for what an audit notes."""
    clock: Clock


class ReplayWork:
    """See `Work`."""

    def __init__(self, job: Job, spec: ReplaySpec, place: Place, target_of: TargetOf) -> None:
        """Prepare; without a target it goes to a topic."""
        self._job, self._spec, self._target, self._target_of = job, spec, target_of(spec.to), target_of
        target = self._target
        self._place = place._replace(kafka=target.kafka, admin=target.admin) if target else place
        self._matcher = Matcher(spec.select) if spec.select is not None else None
        self._problem: HeadraceError | None = None
        self._marks: Marks | None = None
        self._lease: Lease | None = None
        self._restored: RestoredLetters | None = None
        self._earlier: dict[str, int] = {}
        self._goes_on = False

    async def run(self, progress: Mapping[str, Any], tell: Tell, stop: asyncio.Event) -> str:
        spec, place = self._spec, self._place
        found = await place.admin.topic_ids([spec.window.topic])
        if found.get(spec.window.topic) != spec.window.topic_id:
            raise InvalidRequest(f"topic {spec.window.topic} was deleted or made anew: what was to be replayed is gone")
        self._earlier, self._goes_on = dict(progress.get("counts", {})), bool(progress)
        if not progress:
            await tell({"done": 0, "total": spec.window.total})
        if spec.select is None:
            return await self._deliver(progress, tell, stop)
        # Whoever writes marks writes whole blocks of them, so one at a time does.
        lease = self._lease = Lease(place.kafka, place.admin, f"redrive.{spec.window.topic}", place.clock)
        if not await lease.acquire(_LEASE_SECONDS):
            raise LeaseTaken(f"{spec.window.topic} is worked on by {lease.holder}: let it end, and begin again")
        try:
            return await self._deliver(progress, tell, stop)
        finally:
            await lease.release()

    async def _deliver(self, progress: Mapping[str, Any], tell: Tell, stop: asyncio.Event) -> str:
        spec, place, target = self._spec, self._place, self._target
        pump = await self._pump()
        source = WindowSource(
            pump,
            _starts(spec.window, progress),
            spec.window.ends,
            read=functools.partial(read_records, place.kafka),
            start_offsets=place.admin.start_offsets,
            limits=Limits(target.flow if target else TO_TOPIC_FLOW, spec.repeats_at_most, spec.rate),
            clock=place.clock,
        )
        try:
            for service in (pump, source):
                service.on_death = self._died(source)
                await service.start()
            await self._follow(pump, source, tell, stop)
            return self._said(source.standing) if source.finished else ""
        finally:
            for service in (source, pump):
                await service.stop()

    async def _follow(self, pump: Pump, source: WindowSource, tell: Tell, stop: asyncio.Event) -> None:
        """Write down how far it is until nothing is left, or whoever runs it is to stop."""
        clock, saved_at = self._place.clock, self._place.clock.monotonic()
        written: Standing | None = None
        while not (source.finished and written is source.standing):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(source.news.wait(), _LOOK_SECONDS)
            source.news.clear()
            if self._problem:
                raise self._problem
            if self._target_of(self._spec.to) is not self._target:
                raise DestinationUnavailable("what it delivers to was changed or removed: going on when it is there")
            if stop.is_set():
                await source.close(Deadline(clock, _DRAIN_SECONDS))
                await self._save(source, tell)
                return
            now = clock.monotonic()
            if source.is_urgent or now - saved_at >= _SAVE_SECONDS:
                pump.commit_now()
                standing = source.standing
                if await self._save(source, tell):
                    saved_at, written = now, standing

    async def _save(self, source: WindowSource, tell: Tell) -> bool:
        standing = source.standing
        reach("replay.save")
        if self._restored:
            ended = self._restored.take_ended(standing.positions)
            if self._marks and self._lease:
                await self._lease.check()
                for partition, offsets in ended.items():
                    if records := self._marks.records_for(partition.partition, offsets):
                        await write_all(self._place.produce, records, "marks of dead letters")
        if not await tell(self._progress(standing)):
            return False
        reach("replay.saved")
        source.saved(standing)
        return True

    def _progress(self, standing: Standing) -> dict[str, Any]:
        positions = {str(p.partition): list(at) for p, at in standing.positions.items()}
        if sum(len(at.metadata) for at in standing.positions.values()) > _MAPS_CHARACTERS:
            positions = {number: [offset, ""] for number, (offset, _) in positions.items()}
        left = sum(end - standing.positions[place].offset for place, end in self._spec.window.ends.items())
        counts = self._counts(standing)
        total = self._spec.window.total
        return {"positions": positions, "counts": counts, "total": total, "done": total - left}

    def _counts(self, standing: Standing) -> dict[str, int]:
        counts = {name: self._earlier.get(name, 0) + standing.counts.get(name, 0) for name in _TOLD}
        if self._restored:
            counts["passed"] = self._earlier.get("passed", 0) + self._restored.passed
        return counts

    def _said(self, standing: Standing) -> str:
        counts = self._counts(standing)
        unproved = self._restored.unproved if self._restored else 0
        if (
            self._spec.select is not None
            and counts.get("passed") == sum(counts.values())
            and not (self._goes_on or unproved)
        ):
            raise InvalidRequest(f"nothing matches: no letter that is left in {self._spec.window.topic} is selected")
        gone = self._spec.window.total - sum(count for name, count in counts.items() if name not in _NO_ENDINGS)
        plural = "offset of the window holds" if gone == 1 else "offsets of the window hold"
        said = [f"{gone} {plural} no record any more (expired, compacted, aborted, or a marker)"] if gone > 0 else []
        if unproved:
            said.append(f"{unproved} dead letters left: they name an origin that the consumer does not read")
        return "; ".join(said)

    def _died(self, source: WindowSource) -> Callable[[Service], None]:
        def died(service: Service) -> None:
            cause = service.death
            if not isinstance(cause, HeadraceError):
                cause = HeadraceError(f"{service.name} ended by itself: {cause}")
            self._problem = cause
            source.news.set()

        return died

    async def _pump(self) -> Pump:
        spec, target, job = self._spec, self._target, self._job.id
        destination: Destination
        letters: DeadLetterWriter | None = None
        if target is None:
            topic = spec.to["topic"]
            partitions = len((await self._place.admin.describe_topic(topic)).partitions)
            destination, delivery, group = TopicDestination(topic, partitions, self._place.noted, job), _TO_TOPIC, job
        else:
            destination, delivery, group = target.destination, target.delivery, target.pump.group
            letters = target.dead_letters
            if spec.letters:
                if spec.select is not None:
                    self._marks = Marks(self._place.kafka, self._place.admin, spec.window.topic)
                    await self._marks.prepare()
                    await self._marks.load(settled=True)
                destination = self._restored = RestoredLetters(
                    destination, self._wants, target.is_origin, target.pump.epoch_of
                )
        # Tiers are for a partition that others wait for. Nobody waits for a replay.
        retry = delivery.retry.model_copy(
            update={"tiers": [], "keep_key_order": False, "last_retry": spec.last_retry or delivery.retry.last_retry}
        )
        original = restored if self._restored else None
        return Pump(
            f"job {job}",
            group,
            destination,
            ReplayLetters(letters, job, of_letters=self._restored is not None, fail=self._fail),
            delivery=delivery.model_copy(update={"retry": retry}),
            clock=self._place.clock,
            shares_with=target.pump if target else None,
            hooks=PumpHooks(original=original, replay=job),
        )

    def _wants(self, record: Record) -> bool:
        headers = record.headers
        origin = origin_of(headers)
        if origin is None or (self._marks and self._marks.is_ended(record.partition, record.offset)):
            return False
        if not self._matcher:
            return self._target is None or origin.group == self._target.pump.group  # others may write there too
        limit = self._spec.redrives_below
        if limit is not None and redriven_count(headers) >= limit:
            return False
        return self._matcher.matches(record, origin, headers)

    def _fail(self, why: str) -> None:
        self._problem = self._problem or HeadraceError(why)


def _starts(window: Window, progress: Mapping[str, Any]) -> dict[TopicPartition, Committed]:
    reached = progress.get("positions", {})
    return {
        TopicPartition(window.topic, number): Committed(*reached.get(str(number), (start,)))
        for number, (start, _) in window.ranges.items()
    }
