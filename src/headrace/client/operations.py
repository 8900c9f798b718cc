"""What clients do: produce, transactions, and the life of an instance of an active consumer."""

from __future__ import annotations

import urllib.parse
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from headrace.client.exchange import (
    ClientRecord,
    HttpReply,
    HttpRequest,
    NewRecord,
    RetryPolicy,
    Work,
    error_of,
    exchange,
    pause_of,
)
from headrace.errors import CommitRefused, HeadraceError, InstanceExists
from headrace.records import Produced, TopicPartition

KEY: Final = "Idempotency-Key"
EVENT_SECONDS: Final = 45.0
"""A stream is taken for dead after so long: the service sends something every 15 seconds."""
_decode_records = msgspec.json.Decoder(list[ClientRecord]).decode
_decode_record = msgspec.json.Decoder(ClientRecord).decode


class _Outcomes(msgspec.Struct):
    offsets: list[Produced]
    topic: str = ""


class ClientOperations:
    """What a client does by itself."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy

    def produce(
        self, /, topic: str, value: Any, key: Any = None, *, idempotency_key: str | None = None, **fields: Any
    ) -> Work[Produced]:
        """Write one record, and return where it is; see `produce_all`. A value of None is a tombstone."""
        record = NewRecord(value) if key is None else NewRecord(value, key)
        return (yield from self.produce_all(topic, [record], idempotency_key=idempotency_key, **fields))[0]

    def produce_all(
        self, /, topic: str, records: Sequence[NewRecord], *, idempotency_key: str | None = None, **fields: Any
    ) -> Work[list[Produced]]:
        """Write records, all of them or none, and return where they are on every in-sync replica.

        Args:
            topic: Where to.
            records: At least one.
            idempotency_key: Names the request; random by default. A repeated key writes nothing.
            fields: Further fields of the request: `keyFormat`, `valueFormat`, `valueSchemaId` ...
        """
        headers = {KEY: idempotency_key or str(uuid.uuid4())}
        request = HttpRequest("POST", f"/producers/{_quoted(topic)}", {**fields, "records": records}, headers)
        response = yield from exchange(self.policy, request)
        return msgspec.json.decode(response, type=_Outcomes).offsets

    def transaction(
        self,
        /,
        topics: Mapping[str, Sequence[NewRecord]],
        consumer: Consuming | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Work[dict[str, list[Produced]]]:
        """Write records to several topics, and commit what a consumer has handed over: all of it or nothing.

        Raises:
            CommitRefused: Another member has a partition now, or had it meanwhile. Nothing was written or committed:
                drop what was made of records since the last commit. Those of the other partitions are read again.
        """
        body: dict[str, Any] = {"topics": [{**fields, "topic": name, "records": part} for name, part in topics.items()]}
        instance = consumer.operations if consumer else None
        done = dict(instance.done) if instance else {}
        if instance and done:
            body["consumer"] = {"group": instance.group, "instanceId": instance.id, "offsets": _processed(done)}
        request = HttpRequest("POST", "/transactions", body, {KEY: idempotency_key or str(uuid.uuid4())})
        try:
            response = yield from exchange(self.policy, request)
        except CommitRefused as error:
            if instance:
                instance.refused(done, error)
            raise
        if instance:
            instance.forget(done)
        parts = msgspec.json.decode(response, type=dict[str, list[_Outcomes]])["topics"]
        return {part.topic: part.offsets for part in parts}

    def instance(
        self,
        /,
        group: str,
        topics: Sequence[str] = (),
        *,
        pattern: str = "",
        partitions: Sequence[TopicPartition] = (),
        **settings: Any,
    ) -> InstanceOperations:
        """Return a consumer of a group. Its `with` block, or `open`, creates it.

        Args:
            group: The consumer group.
            topics: Topics to subscribe to.
            pattern: Instead: topics whose whole names match, in RE2's syntax.
            partitions: Instead: exactly these, without membership in the group.
            settings: Fields of the creation: `autoOffsetReset`, `valueFormat`, `name`, `responseMinBytes` ...
        """
        reads: dict[str, Any] = {"topic_pattern": pattern} if pattern else {"topics": topics}
        return InstanceOperations(
            self.policy, group, {"partitions": _named(partitions)} if partitions else reads, settings
        )


class _ReadPosition(NamedTuple):
    """Where to read on, and the assignment that it was read in."""

    offset: int
    assignment: str = ""

    def entry(self, partition: TopicPartition) -> dict[str, Any]:
        """Return it as bodies have it."""
        named = {"assignment": self.assignment} if self.assignment else {}
        return {"topic": partition.topic, "partition": partition.partition, "offset": self.offset, **named}


class _Span(NamedTuple):
    """Records of a partition: from the first offset to before the end."""

    first: int
    end: int


Done = dict[tuple[TopicPartition, str], _Span]
"""By partition and assignment: if a partition has two, both are named, and the earlier one is refused."""


class Consuming(Protocol):
    """A consumer, synchronous or not."""

    @property
    def operations(self) -> InstanceOperations:
        """What it has delivered."""


class InstanceOperations:
    """An instance of a consumer group: what it has delivered to the caller, and the requests about it."""

    def __init__(self, policy: RetryPolicy, group: str, reads: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Prepare an instance; `reads` is the body of its subscription or assignment, `settings` that of its creation.

        Its name is random unless the settings have one. So a second creation that finds the first one knows it.
        """
        self.policy = policy
        self.group = group
        self.id = ""
        self.done: Done = {}
        """What was handed to the caller since the last commit."""
        self._reads = reads
        self._settings = {"name": f"client-{uuid.uuid4()}", **settings}
        self._is_random = "name" not in settings
        self._next: dict[TopicPartition, _ReadPosition] = {}
        """After the last record that has arrived, or what was sought since."""
        self._back: dict[TopicPartition, _ReadPosition] = {}
        """Where partitions are read again before anything else."""
        self._moved = set[TopicPartition]()
        """Partitions whose records are not handed out any more that were received before a seek."""
        self._ready = deque[ClientRecord]()
        """Records that have arrived for an iteration, and are not handed out yet."""
        self._in_doubt = False
        """Whether records may have been sent that have not arrived: by a stream, or in a response that was lost."""
        self._sought: dict[str, HttpRequest] = {}
        """Seeks since the last records; repeated when a response with records was lost."""

    def open(self) -> Work[None]:
        """Create the instance, and subscribe or assign what it reads; if that fails, no instance remains."""
        path = f"/consumers/{_quoted(self.group)}"
        headers = {KEY: str(uuid.uuid4())}
        try:
            yield from exchange(self.policy, HttpRequest("POST", path, self._settings, headers))
        except InstanceExists:
            if not self._is_random:
                raise
        self.id = self._settings["name"]
        what = "assignments" if "partitions" in self._reads else "subscriptions"
        try:
            yield from self._send("POST", f"/{what}", self._reads)
        except BaseException:
            yield from self.close()
            raise

    def close(self) -> Work[None]:
        """Delete the instance; one that is gone already is closed."""
        try:
            if self.id:
                yield from self._send("DELETE", "")
        except HeadraceError as error:
            if error.status not in (404, 410):
                raise
        finally:
            self.id = ""
            self._ready.clear()

    def read(
        self, wait_seconds: float = 1.0, max_records: int = 10_000, max_bytes: int = -1
    ) -> Work[list[ClientRecord]]:
        """Return the next records as soon as there are some, or none after `wait_seconds`, at most 30.

        Args:
            wait_seconds: Longest wait.
            max_records: Records at most.
            max_bytes: Bytes of keys and values at most; -1 is the limit of the instance.
        """
        records = yield from self.fetch(wait_seconds, max_records, max_bytes)
        for record in records:
            self.take(record)
        return records

    def fetch(
        self, wait_seconds: float = 30.0, max_records: int = 500, max_bytes: int = -1
    ) -> Work[list[ClientRecord]]:
        """Do the same, and count nothing as handed to the caller. If a response is lost, its records are read again."""
        yield from self.prepare()
        query = f"timeout={int(wait_seconds * 1000)}&max_records={max_records}&max_bytes={max_bytes}"
        limit = wait_seconds + EVENT_SECONDS
        request = HttpRequest("GET", f"{self.path}/records?{query}", repeatable=False, response_seconds=limit)
        self._in_doubt = True
        try:
            records = _decode_records((yield from exchange(self.policy, request, self.restore)))
            self._in_doubt = False
        except HeadraceError:
            self._in_doubt = False
            raise
        for record in records:
            self.arrived(record)
        return records

    def handed(self) -> Work[ClientRecord]:
        """Return the next record of an iteration. A loop that ends keeps the others for the next one."""
        while True:
            while self._ready:
                if self.take(record := self._ready.popleft()):
                    return record
            self._ready.extend((yield from self.fetch()))

    def prepare(self) -> Work[None]:
        """Go back where records must be read again, before others are."""
        for record in reversed(self._ready):
            if (partition := TopicPartition(record.topic, record.partition)) not in self._moved:
                self._back[partition] = _ReadPosition(record.offset, record.assignment)
        self._ready.clear()
        yield from self._move(self._back)
        if self._in_doubt:
            yield from self.restore()
            self._in_doubt = False
        self._moved.clear()

    def streams(self) -> Work[None]:
        """Do the same for a stream, which says nothing of what has arrived."""
        yield from self.prepare()
        self._in_doubt = True

    @property
    def has_moved(self) -> bool:
        """Whether records that were received already are not to be handed out."""
        return bool(self._moved)

    def arrived(self, record: ClientRecord) -> None:
        """Count a record as received."""
        self._next[TopicPartition(record.topic, record.partition)] = _ReadPosition(record.offset + 1, record.assignment)

    def take(self, record: ClientRecord) -> bool:
        """Count a record as handed to the caller; False if it must not be, because it will be read again."""
        partition = TopicPartition(record.topic, record.partition)
        if partition in self._moved:
            return False
        key = partition, record.assignment
        first = self.done[key].first if key in self.done else record.offset
        self.done[key] = _Span(first, record.offset + 1)
        return True

    def forget(self, ended: Done) -> None:
        """Count offsets as committed, or as not to be committed any more."""
        for key, span in ended.items():
            if key in self.done:
                self.done[key] = self.done[key]._replace(first=span.end)
                if self.done[key].end <= span.end:
                    del self.done[key]

    def refused(self, done: Done, error: CommitRefused) -> None:
        """Have records read again of which nothing was committed, where the assignment lasts."""
        gone = {(_partition(one), one.get("assignment", "")) for one in error.parameters.get("refused", ())}
        for (partition, assignment), span in done.items():
            if (partition, assignment) not in gone:
                self._back[partition] = _ReadPosition(span.first, assignment)
                self._moved.add(partition)
            elif partition in self._next and self._next[partition].assignment == assignment:
                del self._next[partition]
        self.done = {key: span for key, span in self.done.items() if key not in done}

    def commit(self) -> Work[dict[TopicPartition, int]]:
        """Commit what was handed to the caller, and return the offsets after it.

        Raises:
            CommitRefused: Another member has a partition now, or had it meanwhile. The others are committed.
        """
        done = dict(self.done)
        try:
            if done:
                yield from self._send("POST", "/offsets", {"offsets": _processed(done)})
        except CommitRefused:
            self.forget(done)
            raise
        self.forget(done)
        return {partition: span.end for (partition, _), span in done.items()}

    def committed(self, partitions: Iterable[TopicPartition]) -> Work[dict[TopicPartition, int]]:
        """Return the committed offsets of the group; partitions without one are left out."""
        response = yield from self._send("PUT", "/offsets", {"partitions": _named(partitions)})
        return {_partition(one): one["offset"] for one in msgspec.json.decode(response)["offsets"]}

    def assigned(self) -> Work[list[TopicPartition]]:
        """Return the partitions that the instance reads now."""
        response = msgspec.json.decode((yield from self._send("GET", "/assignments")))
        found = response[0] if isinstance(response, list) else response  # active_consumers.array_responses
        return [_partition(one) for one in found["partitions"]]

    def seek(self, offsets: Mapping[TopicPartition, int]) -> Work[None]:
        """Read partitions on at other offsets. What was handed over of them before is not committed any more."""
        yield from self._send("POST", "/positions", {"offsets": _offsets(offsets)})
        self._drop(offsets)
        self._next.update({partition: _ReadPosition(at) for partition, at in offsets.items()})

    def seek_times(self, milliseconds: Mapping[TopicPartition, int]) -> Work[None]:
        """Read partitions on at the first record of a time, in milliseconds since the epoch."""
        times = [{"topic": p.topic, "partition": p.partition, "timestamp": at} for p, at in milliseconds.items()]
        yield from self._seek("", {"timestamps": times}, milliseconds)

    def seek_first(self, partitions: Sequence[TopicPartition] = ()) -> Work[None]:
        """Read partitions on at their start; all assigned ones if none is named."""
        yield from self._seek("/first", {"partitions": _named(partitions)}, partitions)

    def seek_last(self, partitions: Sequence[TopicPartition] = ()) -> Work[None]:
        """Read partitions on at their end; all assigned ones if none is named."""
        yield from self._seek("/last", {"partitions": _named(partitions)}, partitions)

    def _seek(self, where: str, body: Mapping[str, Any], partitions: Iterable[TopicPartition]) -> Work[None]:
        request = HttpRequest("POST", f"{self.path}/positions{where}", body)
        yield from exchange(self.policy, request)
        sought = sorted(partitions)
        ready = (TopicPartition(record.topic, record.partition) for record in self._ready)
        self._drop(sought or [*self._next, *self._back, *ready, *(partition for partition, _ in self.done)])
        self._sought.pop(f"{where} {sought}", None)
        self._sought[f"{where} {sought}"] = request  # behind those before it

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        dropped = set(partitions)
        for partition in dropped:
            self._next.pop(partition, None)
            self._back.pop(partition, None)
        self.done = {key: span for key, span in self.done.items() if key[0] not in dropped}
        self._moved |= dropped

    def restore(self) -> Work[None]:
        """Return to the records behind those that have arrived, after a response with others was lost.

        Partitions of which none has arrived in the present assignment return to the last seek, or else to the committed
        offset. Without one they return to the start if `autoOffsetReset` is `earliest`.
        """
        assigned = yield from self.assigned()
        yield from self._return([partition for partition in assigned if partition not in self._next])
        for request in self._sought.values():
            yield from exchange(self.policy, request)
        known = {partition: self._next[partition] for partition in assigned if partition in self._next}
        yield from self._return((yield from self._move(known)))

    def _return(self, partitions: Sequence[TopicPartition]) -> Work[None]:
        committed = (yield from self.committed(partitions)) if partitions else {}
        left = [partition for partition in partitions if partition not in committed]
        if committed:
            yield from self._send("POST", "/positions", {"offsets": _offsets(committed)})
        if left and self._settings.get("autoOffsetReset") == "earliest":
            yield from self._send("POST", "/positions/first", {"partitions": _named(left)})

    def _move(self, targets: dict[TopicPartition, _ReadPosition]) -> Work[list[TopicPartition]]:
        """Read partitions on at other offsets, and return those whose assignment is over; empties the targets."""
        over: list[TopicPartition] = []
        while targets:
            try:
                yield from self._send("POST", "/positions", {"offsets": [at.entry(p) for p, at in targets.items()]})
            except CommitRefused as error:
                gone = [
                    partition
                    for one in error.parameters.get("refused", ())
                    if (partition := _partition(one)) in targets
                ]
                if not gone:
                    raise
                for partition in gone:
                    del targets[partition]
                    self._next.pop(partition, None)
                over += gone
            else:
                self._next.update(targets)
                targets.clear()
        return over

    @property
    def path(self) -> str:
        """Of the instance."""
        return f"/consumers/{_quoted(self.group)}/instances/{_quoted(self.id)}"

    def _send(self, method: str, path: str, body: Any = None) -> Work[bytes]:
        return exchange(self.policy, HttpRequest(method, f"{self.path}{path}", body))


class EventReader:
    """One stream of server-sent events over any number of connections."""

    def __init__(self, instance: InstanceOperations) -> None:
        self._instance = instance
        self._event = self._data = ""
        self._failures = 0

    @property
    def request(self) -> HttpRequest:
        """The request for the stream; it resumes at the positions of the instance."""
        headers = {"Accept": "text/event-stream"}
        return HttpRequest("GET", f"{self._instance.path}/records", None, headers, response_seconds=EVENT_SECONDS)

    def feed(self, line: str) -> ClientRecord | None:
        """Take a line, and return the record that it completes.

        Raises:
            HeadraceError: The event is an error of the service.
        """
        name, _, text = line.partition(": ")
        if name == "event":
            self._event = text
        elif name == "data":
            self._data = text
        elif not line and self._data:
            data, event, self._data, self._event = self._data.encode(), self._event, "", ""
            if event == "error":
                raise error_of(HttpReply(msgspec.json.decode(data)["statusCode"], data, {}))
            record = _decode_record(data)
            self._failures = 0
            self._instance.arrived(record)
            self._instance.take(record)
            return record
        return None

    def recover(self, problem: Exception | None) -> Work[None]:
        """Wait before the next connection, after one has ended.

        Raises:
            HeadraceError, httpx.TransportError: Why the last one ended, if another one does not help.
        """
        policy, self._data, self._event = self._instance.policy, "", ""
        self._failures += 1
        lasting = isinstance(problem, HeadraceError) and not problem.retriable
        if problem and (lasting or self._failures >= policy.attempts):
            raise problem
        yield pause_of(policy, self._failures)


def _named(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": one.topic, "partition": one.partition} for one in partitions]


def _offsets(offsets: Mapping[TopicPartition, int]) -> list[dict[str, Any]]:
    return [_ReadPosition(at).entry(partition) for partition, at in offsets.items()]


def _processed(done: Done) -> list[dict[str, Any]]:
    """Return the last processed offset of each partition and assignment."""
    return [_ReadPosition(span.end - 1, assignment).entry(partition) for (partition, assignment), span in done.items()]


def _partition(entry: Mapping[str, Any]) -> TopicPartition:
    return TopicPartition(entry["topic"], entry["partition"])


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")
