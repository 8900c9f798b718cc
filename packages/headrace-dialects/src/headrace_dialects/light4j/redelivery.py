"""Dead letters delivered again to the backend of their consumer, some batches per call, without joining its group.

A call is a replay of the dead letters that are left; it ends when some of them are completed. Each is delivered once,
and what fails becomes a dead letter again. A call that is interrupted repeats dead letters and loses none. The endpoint
and its response are those of light-4j kafka-sidecar.
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from headrace import errors
from headrace.config.consumers import RetryConfig
from headrace.consumers.running_consumer import RunningConsumer, RunningConsumers
from headrace.delivery.dead_letter import MAX_REDRIVES
from headrace.delivery.offset_map import decode
from headrace.delivery.outcomes import Delivery, Destination, Reply
from headrace.delivery.policy import action_of
from headrace.kafka import Admin
from headrace.kafka.timestamps import iso_ms
from headrace.runs.jobs import Job
from headrace.runs.replay import NothingSelected, ReplayJob, ReplaySpec, RunContext
from headrace.runs.selection import Selection, Window

_MILLISECONDS: Final = 10_000
_MOST_MILLISECONDS: Final = 60_000
_MOST_BATCHES: Final = 4
_DRAIN_SECONDS: Final = 600.0
"""Limit for deliveries that have begun: longer than a backend's own timeout, so that each has an outcome."""
_LEFT: Final = (
    errors.KafkaUnavailable,
    errors.KafkaTimeout,
    errors.DeliveryError,
    errors.TopicNotFound,
    errors.InvalidRequest,
)
"""Errors of a replay that leave dead letters for the next call."""
_COMPLETED: Final = ("delivered", "skipped", "dead_letters", "discarded")
"""Counts of a replay that are completed dead letters."""


class RedeliveryRequest(msgspec.Struct, frozen=True):
    """Which dead letters are delivered again; other fields are ignored, as in light-4j kafka-sidecar."""

    group: str | None = None
    """Selects the consumer of this group; any other name is only repeated in the response."""
    topic: str | None = None
    """Origin topics of the dead letters, separated by commas; by default those in the consumer's `topics`."""
    timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Time in which deliveries may begin, in milliseconds; 10 s by default, a minute at most."""
    lastretry: bool = False
    """In this call, a dead letter that fails again is completed, and does not become a dead letter again."""


class RedeliveryResponse(msgspec.Struct, frozen=True):
    """The outcome of some batches of dead letters; call again until `records` is 0."""

    group: str
    instance: str
    topics: list[str]
    """Dead letter topics that were searched."""
    records: int
    """Dead letters that are completed now."""
    description: str
    status: Literal["empty", "processed", "rolledBack"]
    """`rolledBack` when the backend did not take others, which will be delivered again."""


class _Scope(NamedTuple):
    """What decides which dead letters the next call may skip; another scope skips none."""

    topic_id: str
    consumer: RunningConsumer
    origins: Sequence[str]


class _Call:
    """The destination and the progress of one replay, which it stops when it has delivered anything."""

    def __init__(self, inner: Destination, retry: RetryConfig, progress: Mapping[str, Any]) -> None:
        self.progress = progress
        self.stop = asyncio.Event()
        self.why = ""
        """Why the backend, or Kafka, did not take dead letters."""
        self._inner, self._retry = inner, retry
        self._positions = progress.get("positions", {})

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        try:
            replies = await self._inner.deliver(delivery)
        except errors.DeliveryError as cause:
            self.why = self.why or cause.description
            if not cause.broken_off:  # the pump finds the record that breaks connections
                self.stop.set()
            raise
        unavailable = [r for r in replies if r.error and action_of(r, self._retry) == "unavailable"]
        if unavailable:
            self.fail(errors.DestinationUnavailable(f"{unavailable[0].error}: {unavailable[0].reason}"))
        # A dead letter that fails again says nothing about the backend, so the breaker must not count it.
        alone = len(replies) == 1
        return [
            r._replace(permanent=True) if r.error and r.reached and (alone or r.status is None) else r for r in replies
        ]

    async def save(self, progress: Mapping[str, Any], *, message: str = "") -> bool:
        """Keep the progress, and end the call when it has delivered anything."""
        self.progress = {**self.progress, **progress}
        if self.completed:
            self.stop.set()
        return True

    def fail(self, error: errors.HeadraceError) -> None:
        self.why = self.why or error.description
        self.stop.set()

    @property
    def last(self) -> tuple[int, str]:
        """The highest completed offset of this call, and its partition."""
        positions = self.progress["positions"]
        moved = {number: at for number, at in positions.items() if at != self._positions.get(number)}
        return max((_last(at), number) for number, at in (moved or positions).items())

    def count(self, name: str) -> int:
        return int(self.progress.get("counts", {}).get(name, 0))

    @property
    def completed(self) -> int:
        """Dead letters that this call has completed."""
        return sum(map(self.count, _COMPLETED))

    @property
    def passed(self) -> Mapping[str, Any]:
        """The progress from which the next call continues."""
        counts = {name: self.count(name) for name in ("passed", "unproved")}
        return {"positions": self.progress.get("positions", {}), "counts": counts}


class Redelivery:
    """Serves the calls."""

    def __init__(self, context: RunContext, consumers: RunningConsumers, host: str) -> None:
        """Prepare; `consumers` may change at any time, `host` is shown in the response."""
        self._context, self._consumers = context, consumers
        self._instance = f"Reactive-Replay-{host}"
        self._busy: set[str] = set()
        self._passed: dict[tuple[str, str, bool], tuple[_Scope, Mapping[str, Any]]] = {}
        """By topic, group and `lastretry`: how far the calls of the last scope are."""

    def chosen(self, request: RedeliveryRequest) -> list[tuple[str, RunningConsumer]]:
        """Return the topics whose dead letters are requested, each with every consumer that reads it.

        Raises:
            InvalidTopicName: No consumer of this process reads one of the topics.
        """
        consumers = [each for each in self._consumers.values() if each.kind == "reactive"]
        of_group = [consumer for consumer in consumers if consumer.group == request.group]
        consumers = of_group or consumers
        names = [name.strip() for name in (request.topic or "").split(",") if name.strip()]
        found: list[tuple[str, RunningConsumer]] = []
        for name in dict.fromkeys(names or [topic for consumer in consumers for topic in consumer.topics]):
            readers = [consumer for consumer in consumers if consumer.reads(name)]
            found += [(name, consumer) for consumer in readers]
            if not readers:
                group = f" of group {request.group}" if of_group else ""
                raise errors.InvalidTopicName(
                    f"no reactive consumer{group} here reads {name[:249]}: pass topics as in its setting topics, not "
                    "their dead letter topics"
                )
        return found

    async def run(self, request: RedeliveryRequest) -> RedeliveryResponse:
        """Deliver dead letters that are left, of the first topic that has any.

        Raises:
            InvalidTopicName: See `chosen`.
            InvalidRequest: The backend keeps offsets.
            LeaseTaken: Another run is working on the dead letters of the topic.
            ReadFailed: Kafka or the backend does not respond; what was not completed is left.
        """
        chosen = self.chosen(request)
        if kept := next((c.group for _, c in chosen if c.no_replay), ""):
            raise errors.InvalidRequest(
                f"the backend of group {kept} keeps the group's offsets (backend.offsets_path), and a dead letter "
                "would reset them: redrive its dead letters instead (headrace dlq redrive)"
            )
        searched: dict[tuple[str, RunningConsumer], list[str]] = {}
        for name, consumer in chosen:
            searched.setdefault((consumer.dead_letter.topic_for(name), consumer), []).append(name)
        topics = list(dict.fromkeys(topic for topic, _ in searched))
        group = request.group or next((consumer.group for _, consumer in searched), "")
        unproved: dict[str, int] = {}
        for (topic, consumer), origins in searched.items():
            call = await self._of_topic(topic, consumer, origins, request)
            if call is None:
                continue
            if count := call.count("unproved"):
                unproved[topic] = count
            if call.completed or call.why:
                return self._response(group, topics, topic, call, _unproved(unproved))
        nothing = (
            f"nothing was processed: nothing is left in {', '.join(topics)}, except dead letters of other groups and "
            f"those that were redriven {MAX_REDRIVES} times (lastretry=true delivers them)"
        )
        return RedeliveryResponse(group, self._instance, topics, 0, nothing + _unproved(unproved), "empty")

    async def _of_topic(
        self, topic: str, consumer: RunningConsumer, origins: Sequence[str], request: RedeliveryRequest
    ) -> _Call | None:
        """Run one replay of dead letters of some origins; returns None for a topic that does not exist or is empty."""
        if topic in self._busy:
            raise errors.LeaseTaken(
                f"another call is delivering dead letters of {topic}: call again when it has returned"
            )
        self._busy.add(topic)
        try:
            window = await _window(consumer.admin, topic)
            if not window.total:
                return None
            key = topic, consumer.group, request.lastretry
            scope = _Scope(window.topic_id, consumer, origins)
            earlier, progress = self._passed.get(key, (scope, {}))
            if earlier != scope or _is_cut(window, progress):
                progress = {}
            call = _Call(consumer.destination, consumer.delivery.retry, progress)
            await self._replay(consumer, window, scope, request, call)
            self._passed[key] = scope, call.passed
            return call
        except (errors.KafkaUnavailable, errors.KafkaTimeout) as cause:
            raise errors.ReadFailed(f"dead letters are left, none is lost: {cause.description}") from cause
        finally:
            self._busy.discard(topic)

    async def _replay(
        self, consumer: RunningConsumer, window: Window, scope: _Scope, request: RedeliveryRequest, call: _Call
    ) -> None:
        """Replay the dead letters of a window until some are completed, the backend takes none, or time is up."""
        # Each is delivered once. A call would begin its attempts again, so one that always fails would never end.
        retry = consumer.delivery.retry.model_copy(update={"attempts": 1})
        delivery = consumer.delivery.model_copy(update={"retry": retry})
        target = dataclasses.replace(consumer, destination=call, delivery=delivery, topics=scope.origins, matches=None)
        spec = ReplaySpec(
            window=window,
            to={"consumer": consumer.name},
            last_retry=request.lastretry,
            dead_letters=True,
            select=Selection(groups=[consumer.group]),
            redrives_below=None if request.lastretry else MAX_REDRIVES,
            repeats_at_most=_MOST_BATCHES * delivery.batch.max_records,
        )
        since = iso_ms(int(self._context.clock.time() * 1000))
        job = Job(self._instance, "redelivery", {}, self._instance, since)
        milliseconds = request.timeout or _MILLISECONDS
        seconds = min(milliseconds, _MOST_MILLISECONDS) / 1000

        def target_of(_: object) -> RunningConsumer | None:
            return target if self._consumers.get(consumer.name) is consumer else None

        def begin() -> None:
            asyncio.get_running_loop().call_later(seconds, call.stop.set)

        run = ReplayJob(job, spec, self._context, target_of, drain_seconds=_DRAIN_SECONDS, on_begin=begin)
        try:
            await run.run(call.progress, call.save, call.stop)
            if call.stop.is_set() and not call.completed:
                slow = f"{seconds:g} s were not enough: call again to continue"
                call.why = call.why or consumer.pump.breaker.waits_for or slow
        except NothingSelected:
            pass
        except errors.HeadraceError as failure:
            if not isinstance(failure, _LEFT) and type(failure) is not errors.HeadraceError:
                raise
            call.fail(failure)

    def _response(self, group: str, topics: list[str], topic: str, call: _Call, unproved: str) -> RedeliveryResponse:
        if not call.completed:
            raise errors.ReadFailed(f"dead letters of {topic} are left, none is lost: {call.why}{unproved}")
        offset, partition = call.last
        counts = f"{call.completed} completed"
        if again := call.count("dead_letters"):
            counts += f", {again} of them as dead letters again"
        if discarded := call.count("discarded"):
            counts += f", {discarded} of them discarded at their last retry"
        counts += unproved
        where = f"up to partition:{partition}| offset:{offset}"
        if call.why:
            text = f"processing error and rollback: of {topic} {counts}, others are left ({call.why}); {where}"
            return RedeliveryResponse(group, self._instance, topics, call.completed, text, "rolledBack")
        text = f"success, processed dead letters of {topic}: {counts}; {where}"
        return RedeliveryResponse(group, self._instance, topics, call.completed, text, "processed")


def _last(position: Sequence[Any]) -> int:
    """Return the highest completed offset of a position, which is an offset and its offset map."""
    above = decode(position[1], position[0]) if position[1] else None
    return (above.end if above else position[0]) - 1


async def _window(admin: Admin, topic: str) -> Window:
    """Return the window of a whole topic; it is empty if the topic does not exist."""
    try:
        ranges = await admin.topic_offsets(topic, "Read")
        found = await admin.topic_ids([topic], "Read")
    except errors.TopicNotFound:
        return Window(topic, "", {})
    return Window(topic, found.get(topic, ""), {at.partition: bounds for at, bounds in ranges.items()})


def _is_cut(window: Window, progress: Mapping[str, Any]) -> bool:
    """Return whether a log ends before the progress: its end was lost, and new dead letters have those offsets."""
    positions = progress.get("positions", {})
    return any(
        int(number) in window.ranges and at[0] > window.ranges[int(number)][1] for number, at in positions.items()
    )


def _unproved(counts: Mapping[str, int]) -> str:
    left = ", ".join(f"{count} of {topic}" for topic, count in counts.items())
    return f"; {left} left: the consumer does not read their origin, or it is not requested" if left else ""
