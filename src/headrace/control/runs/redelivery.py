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
from headrace.control.running_consumer import RunningConsumer, RunningConsumers
from headrace.control.runs.jobs import Job
from headrace.control.runs.replay import ReplayJob, ReplaySpec, RunContext
from headrace.control.runs.selection import Selection, Window
from headrace.delivery.dead_letter import MAX_REDRIVES
from headrace.delivery.offset_map import decode
from headrace.delivery.outcomes import Delivery, Destination, Reply
from headrace.kafka.timestamps import iso_ms

_SECONDS: Final = 10.0
_MOST_SECONDS: Final = 60.0
_MOST_BATCHES: Final = 4
_COMPLETED: Final = ("delivered", "skipped", "dead_letters", "given_up")
"""Counts of a replay that are completed dead letters."""


class RedeliveryRequest(msgspec.Struct, frozen=True):
    """Which dead letters are delivered again; other fields are ignored, as in light-4j kafka-sidecar."""

    group: str | None = None
    """Selects the consumer of this group; any other name is only repeated in the response."""
    topic: str | None = None
    """Origin topics of the dead letters, separated by commas; by default those in the consumer's `topics`."""
    timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum time for reading and delivering, in milliseconds; 10 s by default, a minute at most."""
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


class _Key(NamedTuple):
    """What decides which dead letters a call may skip."""

    topic_id: str
    consumer: RunningConsumer
    last_retry: bool


class _Call:
    """The destination and the progress of one replay, which it stops when it has delivered anything."""

    def __init__(self, inner: Destination, progress: Mapping[str, Any]) -> None:
        self.progress = progress
        self.stop = asyncio.Event()
        self.why = ""
        """Why the backend, or Kafka, did not take dead letters."""
        self._inner = inner

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        try:
            return await self._inner.deliver(delivery)
        except errors.DeliveryError as cause:
            self.fail(cause)
            raise

    async def save(self, progress: Mapping[str, Any], *, message: str = "") -> bool:
        """Keep the progress, and end the call when it has delivered anything."""
        self.progress = {**self.progress, **progress}
        if self.completed:
            self.stop.set()
        return True

    def fail(self, error: errors.HeadraceError) -> None:
        self.why = self.why or error.description
        self.stop.set()

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
        self._passed: dict[str, tuple[_Key, Mapping[str, Any]]] = {}
        """By topic, how far the calls of the last key are."""

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
        searched = {(c.group, c.dead_letter.topic_for(name)): c for name, c in chosen}
        topics = list(dict.fromkeys(topic for _, topic in searched))
        group = request.group or next((group for group, _ in searched), "")
        unproved: dict[str, int] = {}
        for (_, topic), consumer in searched.items():
            call = await self._of_topic(topic, consumer, request)
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

    async def _of_topic(self, topic: str, consumer: RunningConsumer, request: RedeliveryRequest) -> _Call | None:
        """Run one replay; returns None for a topic that does not exist or is empty."""
        if topic in self._busy:
            raise errors.LeaseTaken(
                f"another call is delivering dead letters of {topic}: call again when it has returned"
            )
        self._busy.add(topic)
        try:
            window = await Window.resolve(consumer.admin, topic, Selection(), self._context.clock.time())
            if not window.total:
                return None
            key = _Key(window.topic_id, consumer, request.lastretry)
            earlier, progress = self._passed.get(topic, (key, {}))
            call = _Call(consumer.destination, progress if earlier == key else {})
            await self._replay(consumer, window, request, call)
            self._passed[topic] = key, call.passed
            return call
        except errors.TopicNotFound:
            return None
        except (errors.KafkaUnavailable, errors.KafkaTimeout) as cause:
            raise errors.ReadFailed(f"dead letters are left, none is lost: {cause.description}") from cause
        finally:
            self._busy.discard(topic)

    async def _replay(self, consumer: RunningConsumer, window: Window, request: RedeliveryRequest, call: _Call) -> None:
        """Replay the dead letters of a window until some are completed, the backend takes none, or time is up."""
        # Each is delivered once. A call would begin its attempts again, so one that always fails would never end.
        retry = consumer.delivery.retry.model_copy(update={"attempts": 1, "deadline_seconds": None})
        delivery = consumer.delivery.model_copy(update={"retry": retry})
        target = dataclasses.replace(consumer, destination=call, delivery=delivery)
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
        run = ReplayJob(job, spec, self._context, lambda _: target)
        seconds = min(request.timeout / 1000, _MOST_SECONDS) if request.timeout else _SECONDS
        timer = asyncio.get_running_loop().call_later(seconds, call.stop.set)
        try:
            await run.run(call.progress, call.save, call.stop)
            if call.stop.is_set() and not call.completed:
                call.why = call.why or f"{seconds:g} s were not enough: call again to continue"
        except errors.InvalidRequest:  # no dead letter is selected
            pass
        except (errors.KafkaUnavailable, errors.KafkaTimeout, errors.DeliveryError) as failure:
            call.fail(failure)
        finally:
            timer.cancel()

    def _response(self, group: str, topics: list[str], topic: str, call: _Call, unproved: str) -> RedeliveryResponse:
        if not call.completed:
            raise errors.ReadFailed(f"dead letters of {topic} are left, none is lost: {call.why}{unproved}")
        offset, partition = max((_last(at), number) for number, at in call.progress["positions"].items())
        counts = f"{call.completed} completed"
        if again := call.count("dead_letters"):
            counts += f", {again} of them as dead letters again"
        if dropped := call.count("given_up"):
            counts += f", {dropped} of them dropped at their last retry"
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


def _unproved(counts: Mapping[str, int]) -> str:
    left = ", ".join(f"{count} of {topic}" for topic, count in counts.items())
    return f"; {left} left: they name an origin that the consumer does not read" if left else ""
