"""Operations of clients: produce, transactions, and the life of an active consumer's instance."""

from __future__ import annotations

import urllib.parse
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from headrace.client.exchange import ClientRecord, ClientRequest, NewRecord, RetryPolicy, Work, exchange
from headrace.client.received_records import Done, ReadPosition, ReceivedRecords, partition_of
from headrace.errors import CommitRefused, HeadraceError, InstanceExists
from headrace.records import Produced, TopicPartition

KEY: Final = "Idempotency-Key"
_SILENT_SECONDS: Final = 45.0
"""Longest silence of the server beyond the wait of a read."""
_decode_records = msgspec.json.Decoder(list[ClientRecord]).decode


class _Outcomes(msgspec.Struct):
    offsets: list[Produced]
    topic: str = ""


class ClientOperations:
    """Operations of a client, without a consumer."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy

    def produce(
        self, /, topic: str, value: Any, key: Any = None, *, idempotency_key: str | None = None, **fields: Any
    ) -> Work[Produced]:
        """Write one record, and return its partition and offset; see `produce_all`. A value of None is a tombstone."""
        record = NewRecord(value) if key is None else NewRecord(value, key)
        return (yield from self.produce_all(topic, [record], idempotency_key=idempotency_key, **fields))[0]

    def produce_all(
        self, /, topic: str, records: Sequence[NewRecord], *, idempotency_key: str | None = None, **fields: Any
    ) -> Work[list[Produced]]:
        """Write records, all or none, and return their offsets once every in-sync replica has them.

        Args:
            topic: The topic.
            records: At least one.
            idempotency_key: Names the request; random by default. A repeated key writes nothing.
            fields: Further fields of the request: `keyFormat`, `valueFormat`, `valueSchemaId` ...
        """
        headers = {KEY: idempotency_key or str(uuid.uuid4())}
        request = ClientRequest("POST", f"/producers/{_quoted(topic)}", {**fields, "records": records}, headers)
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
        """Write records to several topics, and commit the records that a consumer has returned: all or nothing.

        Raises:
            CommitRefused: Another member has or had a partition. Nothing was written or committed: discard results of
                records since the last commit. Records of the other partitions are read again.
        """
        body: dict[str, Any] = {"topics": [{**fields, "topic": name, "records": part} for name, part in topics.items()]}
        instance = consumer.operations if consumer else None
        done = dict(instance.records.done) if instance else {}
        if instance and done:
            body["consumer"] = {"group": instance.group, "instanceId": instance.id, "offsets": _processed(done)}
        request = ClientRequest("POST", "/transactions", body, {KEY: idempotency_key or str(uuid.uuid4())})
        try:
            response = yield from exchange(self.policy, request)
        except CommitRefused as error:
            if instance:
                instance.records.refused(done, error)
            raise
        if instance:
            instance.records.forget(done)
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


class Consuming(Protocol):
    """A consumer, synchronous or not."""

    @property
    def operations(self) -> InstanceOperations:
        """The state of its records."""


class InstanceOperations:
    """The requests of an instance of a consumer group."""

    def __init__(self, policy: RetryPolicy, group: str, reads: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Prepare an instance; `reads` is the body of its subscription or assignment, `settings` that of its creation.

        Its name is random unless the settings have one. So a repeated creation recognises the first one.
        """
        # Settings
        self.policy = policy
        self.group = group
        self._reads = reads
        self._settings = {"name": f"client-{uuid.uuid4()}", **settings}
        self._is_random = "name" not in settings
        # While it exists
        self.id = ""
        self.records = ReceivedRecords()
        self._in_doubt = False
        """Whether records may have been lost in transit, in a lost response."""
        self._sought: dict[str, ClientRequest] = {}
        """Seeks since the last records; repeated after a lost response."""

    def open(self) -> Work[None]:
        """Create the instance, and subscribe or assign what it reads; if that fails, no instance remains."""
        path = f"/consumers/{_quoted(self.group)}"
        headers = {KEY: str(uuid.uuid4())}
        try:
            yield from exchange(self.policy, ClientRequest("POST", path, self._settings, headers))
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
        """Delete the instance, if it still exists."""
        try:
            if self.id:
                yield from self._send("DELETE", "")
        except HeadraceError as error:
            if error.status not in (404, 410):
                raise
        finally:
            self.id = ""
            self.records.ready.clear()

    def read(
        self, wait_seconds: float = 1.0, max_records: int = 10_000, max_bytes: int = -1
    ) -> Work[list[ClientRecord]]:
        """Return the next records as soon as there are some, or none after `wait_seconds`, at most 30.

        Args:
            wait_seconds: Longest wait.
            max_records: Most records.
            max_bytes: Most bytes of keys and values; -1 is the limit of the instance.
        """
        records = yield from self.fetch(wait_seconds, max_records, max_bytes)
        for record in records:
            self.records.take(record)
        return records

    def fetch(
        self, wait_seconds: float = 30.0, max_records: int = 500, max_bytes: int = -1
    ) -> Work[list[ClientRecord]]:
        """Do the same without counting records as returned. If a response is lost, its records are read again."""
        yield from self.prepare()
        query = f"timeout={int(wait_seconds * 1000)}&max_records={max_records}&max_bytes={max_bytes}"
        limit = wait_seconds + _SILENT_SECONDS
        request = ClientRequest("GET", f"{self.path}/records?{query}", repeatable=False, response_seconds=limit)
        self._in_doubt = True
        try:
            records = _decode_records((yield from exchange(self.policy, request, self.restore)))
            self._in_doubt = False
        except HeadraceError:
            self._in_doubt = False
            raise
        for record in records:
            self.records.arrived(record)
        return records

    def handed(self) -> Work[ClientRecord]:
        """Return the next record of an iteration. After the end of a loop, the next loop gets the rest."""
        ready = self.records.ready
        while True:
            while ready:
                record = ready.popleft()
                if self.records.take(record):
                    return record
            ready.extend((yield from self.fetch()))

    def prepare(self) -> Work[None]:
        """Seek back where records must be read again."""
        self.records.read_ready_again()
        yield from self._move(self.records.back)
        if self._in_doubt:
            yield from self.restore()
            self._in_doubt = False
        self.records.moved.clear()

    def commit(self) -> Work[dict[TopicPartition, int]]:
        """Commit the records returned to the caller, and return the offsets after them.

        Raises:
            CommitRefused: Another member has or had a partition. The others are committed.
        """
        done = dict(self.records.done)
        try:
            if done:
                yield from self._send("POST", "/offsets", {"offsets": _processed(done)})
        except CommitRefused:
            self.records.forget(done)
            raise
        self.records.forget(done)
        return {partition: span.end for (partition, _), span in done.items()}

    def committed(self, partitions: Iterable[TopicPartition]) -> Work[dict[TopicPartition, int]]:
        """Return the committed offsets of the group, without partitions that have none."""
        response = yield from self._send("PUT", "/offsets", {"partitions": _named(partitions)})
        return {partition_of(one): one["offset"] for one in msgspec.json.decode(response)["offsets"]}

    def assigned(self) -> Work[list[TopicPartition]]:
        """Return the partitions that the instance reads now."""
        response = msgspec.json.decode((yield from self._send("GET", "/assignments")))
        found = response[0] if isinstance(response, list) else response  # active_consumers.array_responses
        return [partition_of(one) for one in found["partitions"]]

    def seek(self, offsets: Mapping[TopicPartition, int]) -> Work[None]:
        """Continue partitions at other offsets. Their records returned before are no longer committed."""
        yield from self._send("POST", "/positions", {"offsets": _offsets(offsets)})
        self.records.drop(offsets)
        self.records.next.update({partition: ReadPosition(at) for partition, at in offsets.items()})

    def seek_times(self, milliseconds: Mapping[TopicPartition, int]) -> Work[None]:
        """Continue partitions at the first record of a time, in milliseconds since the epoch."""
        times = [{"topic": p.topic, "partition": p.partition, "timestamp": at} for p, at in milliseconds.items()]
        yield from self._seek("", {"timestamps": times}, milliseconds)

    def seek_first(self, partitions: Sequence[TopicPartition] = ()) -> Work[None]:
        """Continue partitions at their start; by default all assigned ones."""
        yield from self._seek("/first", {"partitions": _named(partitions)}, partitions)

    def seek_last(self, partitions: Sequence[TopicPartition] = ()) -> Work[None]:
        """Continue partitions at their end; by default all assigned ones."""
        yield from self._seek("/last", {"partitions": _named(partitions)}, partitions)

    def _seek(self, where: str, body: Mapping[str, Any], partitions: Iterable[TopicPartition]) -> Work[None]:
        request = ClientRequest("POST", f"{self.path}/positions{where}", body)
        yield from exchange(self.policy, request)
        sought = sorted(partitions)
        self.records.drop(sought or self.records.partitions)
        self._sought.pop(f"{where} {sought}", None)
        self._sought[f"{where} {sought}"] = request  # last

    def restore(self) -> Work[None]:
        """Seek to the offsets after the records that have arrived, after a response was lost.

        Partitions without a record in the present assignment return to the last seek, otherwise to the committed
        offset. If there is neither, they return to the start if `autoOffsetReset` is `earliest`.
        """
        assigned = yield from self.assigned()
        arrived = self.records.next
        yield from self._return([partition for partition in assigned if partition not in arrived])
        for request in self._sought.values():
            yield from exchange(self.policy, request)
        known = {partition: arrived[partition] for partition in assigned if partition in arrived}
        yield from self._return((yield from self._move(known)))

    def _return(self, partitions: Sequence[TopicPartition]) -> Work[None]:
        committed = (yield from self.committed(partitions)) if partitions else {}
        left = [partition for partition in partitions if partition not in committed]
        if committed:
            yield from self._send("POST", "/positions", {"offsets": _offsets(committed)})
        if left and self._settings.get("autoOffsetReset") == "earliest":
            yield from self._send("POST", "/positions/first", {"partitions": _named(left)})

    def _move(self, targets: dict[TopicPartition, ReadPosition]) -> Work[list[TopicPartition]]:
        """Seek to targets, and remove them; return the partitions whose assignment has ended."""
        over: list[TopicPartition] = []
        while targets:
            try:
                yield from self._send("POST", "/positions", {"offsets": [at.entry(p) for p, at in targets.items()]})
            except CommitRefused as error:
                refused = map(partition_of, error.parameters.get("refused", ()))
                gone = [partition for partition in refused if partition in targets]
                if not gone:
                    raise
                for partition in gone:
                    del targets[partition]
                    self.records.next.pop(partition, None)
                over += gone
            else:
                self.records.next.update(targets)
                targets.clear()
        return over

    @property
    def path(self) -> str:
        return f"/consumers/{_quoted(self.group)}/instances/{_quoted(self.id)}"

    def _send(self, method: str, path: str, body: Any = None) -> Work[bytes]:
        return exchange(self.policy, ClientRequest(method, f"{self.path}{path}", body))


def _named(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": one.topic, "partition": one.partition} for one in partitions]


def _offsets(offsets: Mapping[TopicPartition, int]) -> list[dict[str, Any]]:
    return [ReadPosition(at).entry(partition) for partition, at in offsets.items()]


def _processed(done: Done) -> list[dict[str, Any]]:
    """Return the last processed offset of each partition and assignment."""
    return [ReadPosition(span.end - 1, assignment).entry(partition) for (partition, assignment), span in done.items()]


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")
