"""`/consumers`: active consumers, which clients create, read and commit over HTTP.

Fields may have their documented names or those of the light-4j kafka-sidecar's protocol.
"""

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any, Final

from pydantic import ValidationError

from headrace import errors
from headrace.config.active import ActiveConsumersConfig
from headrace.config.section import compile_pattern
from headrace.errors import InstanceInvalid, InvalidRequest
from headrace.formats.choice import format_name
from headrace.http.arrival import Arrival
from headrace.http.auth.principals import READ, WRITE
from headrace.http.endpoint import JSON as JSON_TYPE
from headrace.http.endpoint import KAFKA, Call, CallEvent, Endpoint, Errors, Rule, owner_of
from headrace.http.messages import JSON, HttpResponse, decode_body, decode_query
from headrace.http.request import ClientGone, HttpRequest
from headrace.http.request_checks import IDEMPOTENCY_KEY, check_key
from headrace.kafka import Admin, ReadPolicy
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.timestamps import parse_time
from headrace.records import CommitOffsets, RecordBatch, TopicPartition
from headrace.runtime import clock, run_while
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.tracing import current_span
from headrace.sidecar.active.instance import ActiveInstance, Read, arrived
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.read_entries import EntryWriter
from headrace.sidecar.active.read_stream import EVENTS, LAST_EVENT_ID, NDJSON, received_of, stream_records
from headrace.sidecar.active.requests import (
    MOST_RECORDS,
    Assigned,
    CommitQuery,
    CommitRequest,
    CommittedOffsets,
    ConsumedRecord,
    Created,
    CreateInstance,
    Moment,
    PartitionName,
    Partitions,
    Position,
    ReadQuery,
    SeekPositions,
    Subscribed,
    SubscribeRequest,
)
from headrace.sidecar.active.spec import InstanceSpec, Topics, random_name
from headrace.sidecar.record_json import fitting

log = logging.getLogger(__name__)

INSTANCES: Final = "/consumers/{group}"
INSTANCE: Final = INSTANCES + "/instances/{instance}"
_MAY_READ: Final = Rule((READ,), "group", "group")
_MAY_JOIN: Final = Rule((READ,), "group", "group", also="consume")
_MAY_CHANGE: Final = Rule((READ, WRITE), "group", "group")
"""For operations that neither read nor join a group: light-4j lists them under `kafka:w`."""
_ERRORS: Final[Errors] = (
    *KAFKA,
    errors.InstanceNotFound,
    errors.InstanceState,
    errors.InstanceGone,
    errors.OwnerUnavailable,
)
_KEY: Final = ("group", "instance")
_reads = functools.partial(Endpoint, rule=_MAY_READ, errors=_ERRORS, affinity=_KEY)
_changes = functools.partial(Endpoint, rule=_MAY_CHANGE, errors=_ERRORS, affinity=_KEY, strict=False)
_joins = functools.partial(_changes, rule=_MAY_JOIN)
_PARTITION: Final = {"partitions": [{"topic": "orders", "partition": 0}]}
_MOST_BYTES: Final = 2_097_152
_UNNOTICED_BYTES: Final = 65_536
"""Encrypted bytes that may wait in this process unnoticed."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")


class ActiveEndpoints:
    """The operations of active consumers."""

    def __init__(self, settings: ActiveConsumersConfig, instances: ActiveInstances, admin: Admin) -> None:
        self._settings = settings
        self._instances = instances
        self._admin = admin

    @_changes(
        "POST",
        INSTANCES,
        "createConsumerInstanceInGroup",
        "Create an instance in a group",
        responses={200: Created},
        request={JSON_TYPE: CreateInstance},
        example={"keyFormat": "string", "autoOffsetReset": "earliest"},
        headers={"Idempotency-Key": "Names the request: sent again, it answers with the same instance."},
        affinity=(),
        errors=(
            *_ERRORS,
            errors.IdempotencyKeyReused,
            errors.InstanceExists,
            errors.InstanceInvalid,
            errors.TooManyRequests,
        ),
        audited="create",
        decoded=False,
    )
    async def create(self, call: Call[bytes, None]) -> HttpResponse:
        body = decode_body(call.body, CreateInstance, strict=False)
        key = call.request.head.headers.get(IDEMPOTENCY_KEY)
        named = "" if key is None else check_key(key).decode()
        spec = self._spec(body, check_group(call.parameters["group"]), owner_of(call.request), named)
        call.event = CallEvent(f"active consumer {spec.group}/{spec.name}")
        instance = await self._instances.create(spec, is_named=bool(body.id or body.name))
        uri = f"/consumers/{spec.group}/instances/{instance.spec.name}"
        response = Created(instance.spec.name, uri, instance.spec.name, uri)
        if warnings := spec.policy.member.warnings(self._admin.config.properties):
            response.warnings = warnings
            log.warning("instance %s: %s", instance.spec.id, "; ".join(warnings))
        return HttpResponse(response)

    def _spec(self, body: CreateInstance, group: str, owner: str, key: str) -> InstanceSpec:
        settings = self._settings
        minimum = _first(body.response_min_bytes, body.fetch_min_bytes, -1)
        wait_ms = _first(body.request_wait_ms, body.request_timeout_ms)
        auto_commit = _first(body.auto_commit_enable, body.auto_commit, body.enable_auto_commit, False)
        reset = _first(body.auto_offset_reset, body.reset, settings.auto_offset_reset)
        try:
            member = type(settings.consumer)(properties={**settings.consumer.properties, **body.membership})
            member.client_properties(self._admin.config.properties)
        except ValueError as cause:
            raise InstanceInvalid(_why(cause)) from None
        auto_ms = body.auto_commit_interval or int(str(member.properties.get("auto.commit.interval.ms", 0)))
        return InstanceSpec(
            group=group,
            name=_check_name(body.id or body.name or random_name()),
            owner=owner,
            key_format=format_name(body.key_format or body.format or settings.key_format),
            value_format=format_name(body.value_format or body.format or settings.value_format),
            wait_seconds=settings.wait_seconds if wait_ms is None else wait_ms / 1000,
            min_bytes=minimum,
            max_read_bytes=settings.max_read_bytes,
            auto_commit_seconds=(auto_ms / 1000 if auto_ms else settings.auto_commit_seconds) if auto_commit else None,
            buffer_bytes=settings.buffer_bytes,
            policy=ReadPolicy(reset, member=member, advice="seek it, with POST .../positions"),
            linger_seconds=settings.linger_seconds if body.linger_ms is None else body.linger_ms / 1000,
            key=key,
        )

    @_changes("DELETE", INSTANCE, "deleteConsumerInstance", "Close an instance", audited="close")
    async def delete(self, call: Call[None, None]) -> None:
        instance = self._find(call.request)
        call.event = _event(call)
        await self._instances.delete(instance)

    @_changes(
        "POST",
        f"{INSTANCE}/offsets",
        "commmitConsumerOffsets",
        "Commit offsets, or what was delivered",
        responses={200: list[Position]},
        example={"offsets": [{"topic": "orders", "partition": 0, "offset": 41}]},
        errors=(*_ERRORS, errors.CommitRefused),
    )
    async def commit(self, call: Call[CommitRequest, CommitQuery]) -> HttpResponse:
        instance = self._find(call.request)
        if call.body.offsets is None and int(call.request.head.headers.get(b"content-length", b"0")):
            raise InvalidRequest("the body has no offsets; name some, or send no body to commit what was delivered")
        processed = None if call.body.offsets is None else [one.processed() for one in call.body.offsets]
        committed = await instance.commit(processed, wait=not call.query.asynchronous)
        return HttpResponse(_positions(committed) if call.query.show or processed is None else [])

    @_changes(
        "PUT", f"{INSTANCE}/offsets", "getCommittedOffsets", "Committed offsets of partitions", example=_PARTITION
    )
    async def committed(self, call: Call[Partitions, None]) -> CommittedOffsets:
        found = await self._find(call.request).membership.committed(call.body.all)
        return CommittedOffsets(_positions(found))

    @_joins(
        "POST",
        f"{INSTANCE}/subscriptions",
        "subscribeTopics",
        "Subscribe to topics or a pattern, instead of those before",
        example={"topics": ["orders"]},
    )
    async def subscribe(self, call: Call[SubscribeRequest, None]) -> None:
        instance = self._find(call.request)
        principal = call.request.caller.principal
        body = call.body

        def may_read(topic: str) -> bool:
            return not topic.startswith("_") and (principal is None or principal.may((READ,), "consume", topic))

        if body.topics:
            for topic in body.topics:
                check_topic(topic)
                if principal:
                    principal.require((READ,), "consume", topic)
            await instance.membership.subscribe(Topics(list(dict.fromkeys(body.topics))))
        elif body.topic_pattern:
            try:
                matches = compile_pattern(body.topic_pattern)
            except ValueError as cause:
                raise InvalidRequest(f"topic_pattern {cause}", parameter="topic_pattern") from None
            await instance.membership.subscribe(Topics(matches=lambda topic: matches(topic) and may_read(topic)))

    @_reads(
        "GET", f"{INSTANCE}/subscriptions", "getSubscribedTopics", "Topics of an instance", responses={200: Subscribed}
    )
    async def subscriptions(self, call: Call[None, None]) -> HttpResponse:
        found = Subscribed(self._find(call.request).membership.topics)
        return HttpResponse([found] if self._settings.array_responses else found)

    @_changes("DELETE", f"{INSTANCE}/subscriptions", "unsubscribeTopics", "Read nothing, and leave the group")
    async def unsubscribe(self, call: Call[None, None]) -> None:
        await self._find(call.request).unsubscribe()

    @_joins(
        "POST",
        f"{INSTANCE}/assignments",
        "assignPartitions",
        "Read exactly these partitions, without membership in the group",
        example=_PARTITION,
    )
    async def assign(self, call: Call[Partitions, None]) -> None:
        instance = self._find(call.request)
        principal = call.request.caller.principal
        partitions = list(dict.fromkeys(call.body.all))
        for topic in dict.fromkeys([partition.topic for partition in partitions]):
            if principal:
                principal.require((READ,), "consume", topic)
        await instance.membership.subscribe(Topics(partitions=partitions))

    @_reads(
        "GET",
        f"{INSTANCE}/assignments",
        "getAssignedPartitions",
        "Partitions that an instance reads now",
        responses={200: Assigned},
    )
    async def assignments(self, call: Call[None, None]) -> HttpResponse:
        instance = self._find(call.request)
        reads = instance.membership.reads
        assigned = reads.partitions if reads else None  # already, though its consumer assigns them only in a moment
        partitions = instance.assigned if assigned is None else sorted(assigned)
        found = Assigned([PartitionName(*partition) for partition in partitions])
        return HttpResponse([found] if self._settings.array_responses else found)

    @_changes(
        "POST",
        f"{INSTANCE}/positions",
        "overrideFetchOffset",
        "Read partitions from offsets or times on",
        example={"offsets": [{"topic": "orders", "partition": 0, "offset": 0}]},
        errors=(*_ERRORS, errors.CommitRefused),
        audited="seek",
    )
    async def seek(self, call: Call[SeekPositions, None]) -> None:
        instance = self._find(call.request)
        call.event = _event(call)
        named = [one.processed(0) for one in call.body.offsets]
        targets = {one.partition: one.at.offset for one in named}
        times = {
            TopicPartition(check_topic(one.topic), one.partition): _milliseconds(one) for one in call.body.timestamps
        }
        if times:  # a missing partition is refused before the wait for an assignment
            targets |= {**await self._admin.end_offsets(times), **await self._admin.offsets_at(times)}
        await instance.wait_assigned(list(targets))
        await instance.seek(targets, [one for one in named if one.assignment])

    @_changes(
        "POST",
        f"{INSTANCE}/positions/first",
        "seekFirstOffset",
        "Read partitions from their first record on",
        example=_PARTITION,
        audited="seek to the start",
    )
    async def first(self, call: Call[Partitions, None]) -> None:
        instance = self._find(call.request)
        call.event = _event(call)
        is_last = call.request.head.pattern.endswith("/last")
        partitions = call.body.all
        offsets_of = self._admin.end_offsets if is_last else self._admin.start_offsets
        targets = await offsets_of(partitions)  # a missing partition is refused before the wait for an assignment
        await instance.wait_assigned(partitions)
        await instance.seek(targets if partitions else await offsets_of(instance.assigned))

    last = first.at(
        "POST",
        f"{INSTANCE}/positions/last",
        "seekLastOffset",
        summary="Read partitions from their end on",
        audited="seek to the end",
    )

    @_reads(
        "GET",
        f"{INSTANCE}/records",
        "fetchTopicData",
        "The next records",
        responses={200: (list[ConsumedRecord], EVENTS, NDJSON)},
        query=ReadQuery,
        errors=(
            *_ERRORS,
            errors.CommitRefused,
            errors.InstanceBusy,
            errors.InvalidOffset,
            errors.ReadFailed,
            errors.TopicRecreated,
        ),
        effect=True,
        long_poll=True,
        whole=True,
    )
    async def records(self, request: HttpRequest) -> None:
        query = decode_query(request, ReadQuery)
        instance = self._find(request)
        entries = instance.entries if query.format is None else self._instances.entries(instance.spec, query.format)
        spec = instance.spec
        accepts = request.head.headers.get(b"accept", b"").decode("latin-1").lower()
        if EVENTS in accepts or NDJSON in accepts:
            last = request.head.headers.get(LAST_EVENT_ID, b"").decode("latin-1") or query.ack
            streaming = stream_records(
                instance,
                entries,
                request,
                events=EVENTS in accepts,
                received=received_of(last) if last else [],
                at_most_once=query.delivery is not None,
            )
            await run_while(streaming, request.body.closed())
            return
        if query.ack:
            raise InvalidRequest("ack is only for streams; name offsets in a commit", parameter="ack")
        max_bytes = max(query.max_bytes, query.max_bytes_camel)
        read = await load_read(
            instance,
            entries,
            request,
            max_bytes=min(spec.max_read_bytes if max_bytes < 0 else max_bytes, _MOST_BYTES),
            max_records=min(query.max_records, MOST_RECORDS),
            wait_seconds=spec.wait_seconds if query.timeout < 0 else query.timeout / 1000,
        )
        await respond_read(self._instances, read, entries, request, at_most_once=query.delivery is not None)

    def _find(self, request: HttpRequest) -> ActiveInstance:
        parameters = request.head.route.parameters
        return self._instances.use(parameters["group"], parameters["instance"], owner_of(request))


def _event(call: Call[Any, Any]) -> CallEvent:
    return CallEvent(f"active consumer {call.parameters['group']}/{call.parameters['instance']}")


async def load_read(
    instance: ActiveInstance,
    entries: EntryWriter,
    request: HttpRequest,
    *,
    max_bytes: int,
    max_records: int,
    wait_seconds: float,
) -> Read:
    """Wait for the next records of an instance, and for what their entries need; see `ActiveInstance.read`.

    Raises:
        ClientGone: The client has closed the connection meanwhile.
        RegistryUnavailable: A schema of the records is not cached, and the registry does not respond.
    """
    began_ns = clock.time_ns()
    reads: list[Read] = []  # it may end in the turn in which its caller is cancelled

    async def reading() -> None:
        reads.append(await instance.read(max_bytes=max_bytes, max_records=max_records, wait_seconds=wait_seconds))

    try:
        await run_while(reading(), request.body.closed())
        if not reads:
            raise ClientGone
        _trace_read(instance.spec.group, reads[0].batches, began_ns)
        if entries.needs_schemas:
            await entries.load(reads[0].batches)
    except BaseException:
        for read in reads:
            read.end(0)
        raise
    return reads[0]


async def respond_read(
    instances: ActiveInstances, read: Read, entries: EntryWriter, request: HttpRequest, *, at_most_once: bool = False
) -> None:
    """Respond with the records of a read; if they are not written completely, they return to the instance."""
    try:
        start, count = fitting(entries.write(read.batches, read.assignments))
        end = b"]"
        size = len(start) + len(end)
        with instances.answering(size):
            head = [(b"content-type", JSON), (b"content-length", b"%d" % size)]
            await request.response.start(200, head)
            # With TLS, the end waits only while more bytes than that are unsent; so a large response has two parts.
            for part in (start, end) if size > _UNNOTICED_BYTES else (start + end,):
                if not (arrival := await request.response.write_through(part)):
                    return
            received = arrived
            if isinstance(arrival, Arrival) and count and not at_most_once:  # else another process confirms it
                arrival.await_close()
                received = arrival.received
            read.end(count, received)
            await request.response.end()
    finally:
        read.end(0)


def _trace_read(group: str, batches: Sequence[RecordBatch], began_ns: int) -> None:
    """Trace a read within a sampled request: from `began_ns`, nanoseconds since the epoch, until now.

    Source: OpenTelemetry's semantic conventions for messaging.
    """
    request = current_span.get()
    if tracing.tracer is None or request is None:
        return
    headers = [own for batch in batches for own in batch.headers or ()]
    found = [carried for own in headers if (carried := tracing.tracer.of_record(own))]
    attributes: dict[str, str | int | float] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "receive",
        "messaging.operation.name": "receive",
        "messaging.consumer.group.name": group,
        "messaging.batch.message_count": sum(map(len, batches)),
        "messaging.destination.name": ", ".join(sorted({batch.topic_partition.topic for batch in batches})),
    }
    request.child("receive", "CONSUMER", attributes, found).end_between(began_ns, clock.time_ns())


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _why(cause: ValueError) -> str:
    """Return a sentence per mistake."""
    if not isinstance(cause, ValidationError):
        return str(cause)
    return "; ".join(one["msg"].removeprefix("Value error, ") for one in cause.errors())


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InstanceInvalid(
            f"{name[:60]!r} is not a valid instance name; use 1 to 200 letters, digits, dots, underscores and hyphens"
        )
    return name


def _milliseconds(moment: Moment) -> int:
    if isinstance(moment.timestamp, int) or (moment.timestamp.isascii() and moment.timestamp.isdigit()):
        return max(0, min(int(moment.timestamp), 2**62))
    try:
        return int(parse_time(moment.timestamp).timestamp() * 1000)
    except ValueError as cause:
        raise InvalidRequest(f"timestamp {cause}", parameter="timestamps") from None


def _positions(offsets: CommitOffsets) -> list[Position]:
    return [Position(*partition, at.offset, at.metadata) for partition, at in sorted(offsets.items())]
