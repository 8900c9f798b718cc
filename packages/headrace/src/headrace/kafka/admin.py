"""Reads and changes topics, groups and offsets of one cluster. Every call has a time limit."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka.client import library
from headrace.kafka.client.access import Kind, Right, is_refused
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.error_map import to_error
from headrace.kafka.client.properties import client_properties
from headrace.kafka.client.reachability import Reachability
from headrace.kafka.cluster_info import ClusterInfo, GroupInfo, GroupMember, PartitionInfo, TopicInfo
from headrace.kafka.names import check_group, check_topic, names_of
from headrace.records import Offsets, TopicPartition
from headrace.runtime import SystemClock, run_blocking

T = TypeVar("T")
_MOVE_PAUSE_SECONDS = 0.1
_WAIT_SECONDS = 1.5
_FIRST_ATTEMPT_SECONDS = 1.0
_UNSURE_SECONDS = 3.0
_MORE_HEADERS_BYTES = 65_536
_MOST_BYTES = 2**31 - 1
_ALREADY_THERE = library.KafkaError.TOPIC_ALREADY_EXISTS
_NO_LEADER = library.KafkaError._NOENT
_MISSING = (library.KafkaError.UNKNOWN_TOPIC_OR_PART, library.KafkaError._UNKNOWN_PARTITION, _NO_LEADER)
"""Errors about a partition that does not exist."""
_COMMITTED = library.IsolationLevel.READ_COMMITTED
_UNCOMMITTED = library.IsolationLevel.READ_UNCOMMITTED


class Admin:
    """One cluster, as all its clients in this process share it; made without contact to a broker."""

    on_wait: ClassVar[Callable[[str], None] | None] = None
    """Called with a sentence when Kafka has not answered a call for a moment; for commands on a terminal."""

    def __init__(self, kafka: KafkaConfig, reachability: Reachability | None = None) -> None:
        self.config = kafka
        """The cluster, and the settings of its clients."""
        self._limit = kafka.request_timeout_seconds
        self.servers = kafka.bootstrap_servers
        """Brokers for the first connection."""
        self.reachability = reachability or Reachability(kafka, SystemClock())
        """Whether the cluster answers; gets the errors of every client."""
        self.missing_brokers: Sequence[int] = ()
        """Ids of the brokers that had replicas and were not in the cluster when topics were last listed."""
        errors_to = self.reachability
        # Without this object in it, the client ends, with its connections, when this object does.
        self._security = ClientSecurity(kafka.security, lambda: library.AdminClient(_properties(kafka, errors_to)))
        self._client = self._security.make()

    async def request(self, doing: str, call: Callable[[library.AdminClient, float], T], *needed: Right) -> T:
        """Return the result of a call of the client, which gets its time limit in seconds.

        Raises:
            KafkaUnavailable: No broker answers within the limit.
        """
        return await self._request(doing, lambda: call(self._client, self._limit), needed=needed)

    async def list_topics(self, limit_seconds: float | None = None) -> list[TopicInfo]:
        """Return every topic that is not internal to Kafka, sorted by name.

        Raises:
            KafkaUnavailable: No broker answers within the limit.
        """
        limit = limit_seconds or self._limit
        metadata = await self._request("list topics", lambda: self._client.list_topics(timeout=limit), limit)
        self.missing_brokers = _missing_brokers(metadata)
        return sorted(_topic_info(topic) for name, topic in metadata.topics.items() if not name.startswith("__"))

    async def has_topic(self, name: str) -> bool:
        """Return whether the cluster has a topic, for a caller that reads it."""
        # Not by its metadata: that would create the topic where brokers create topics automatically.
        return name in await self.topic_ids([name], "Read")

    async def describe_topic(self, name: str, right: str = "Describe") -> TopicInfo:
        """Return one topic; `right` is what the caller needs on it.

        Raises:
            TopicNotFound: The cluster does not have it.
            KafkaUnavailable: No broker answers.
        """
        check_topic(name)
        metadata = await self._request(f"describe topic {name}", lambda: self._client.list_topics(name, self._limit))
        topic = metadata.topics.get(name)
        problem = topic.error if topic else None
        if problem and problem.code() != library.KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise to_error(problem, f"describe topic {name}", self.config, Right(right, "topic", name))
        if topic is None or problem:
            raise errors.TopicNotFound(
                f"topic {name} does not exist on {self.servers}: create it "
                f"(headrace topics create {name}) or check its spelling",
                topic=name,
            )
        return _topic_info(topic)

    async def topic_configs(self, name: str) -> dict[str, str]:
        """Return the effective configuration of a topic: Kafka's name to text."""
        resource = library.ConfigResource(library.ResourceType.TOPIC, check_topic(name))
        right = Right("DescribeConfigs", "topic", name)
        return await self._configs(resource, f"describe topic {name}", right)

    async def describe_cluster(self) -> ClusterInfo:
        """Return the number of brokers, those that are missing, and the configuration of one.

        Raises:
            KafkaUnavailable: No broker answers.
        """
        doing = "describe the cluster"
        metadata = await self._request(doing, lambda: self._client.list_topics(timeout=self._limit))
        count = len(metadata.brokers)
        missing = _missing_brokers(metadata)
        resource = library.ConfigResource(library.ResourceType.BROKER, str(min(metadata.brokers)))
        try:
            configs = await self._configs(resource, doing, Right("DescribeConfigs", "cluster"))
        except errors.KafkaUnauthorized as cause:
            return ClusterInfo(count, missing, {}, cause.description)
        return ClusterInfo(count, missing, configs)

    async def _configs(self, resource: library.ConfigResource, doing: str, right: Right) -> dict[str, str]:
        entries = await self._first(doing, lambda: self._client.describe_configs([resource]), right)
        return {entry.name: entry.value for entry in entries.values() if entry.value is not None}

    async def topic_ids(self, names: Collection[str], right: str = "Describe") -> dict[str, str]:
        """Return the id of each topic that exists; a recreated topic has another id (KIP-516).

        `right` is what the caller needs on each.
        """

        def request() -> dict[str, str]:
            found = {}
            futures = self._client.describe_topics(library.TopicCollection(list(names)), request_timeout=self._limit)
            for name, future in futures.items():
                try:
                    found[name] = str(_result(future, self._limit, Right(right, "topic", name)).topic_id)
                except library.KafkaException as cause:
                    if cause.args[0].code() != library.KafkaError.UNKNOWN_TOPIC_OR_PART:
                        raise
            return found

        return await self._request("describe topics", request) if names else {}

    async def create_topic(
        self, name: str, partitions: int = 1, replication_factor: int = -1, configs: Mapping[str, str] | None = None
    ) -> bool:
        """Create a topic unless it exists, by default with the broker's replication factor; return whether it did."""
        topic = library.NewTopic(check_topic(name), partitions, replication_factor, config=dict(configs or {}))
        try:
            right = Right("Create", "topic", name)
            await self._first(f"create topic {name}", lambda: self._client.create_topics([topic]), right)
        except errors.KafkaError as error:
            if error.parameters.get("kafka_code") == _ALREADY_THERE:
                return False
            raise
        return True

    async def ensure_topic_like(
        self,
        name: str,
        source: str,
        partitions: int = 0,
        configs: Mapping[str, str] | None = None,
        fits: Collection[str] = (),
    ) -> None:
        """Create an internal topic with the replication factor and min ISR of `source`, and by default its partitions.

        Its records may be 64 KiB larger than those of `source` and of the topics in `fits`, because dead letters have
        further headers. Without a `source` the broker's defaults apply.
        """
        if not source:
            await self.create_topic(name, partitions or 1, configs=configs)
            return
        origin = await self.describe_topic(source)
        limits = await self.topic_configs(source)
        all_configs = {"min.insync.replicas": limits.get("min.insync.replicas", "1"), **(configs or {})}
        sizes = [limits.get("max.message.bytes")]
        for topic in {*fits} - {source}:
            with contextlib.suppress(errors.TopicNotFound):
                sizes.append((await self.topic_configs(topic)).get("max.message.bytes"))
        if known := [int(size) for size in sizes if size]:
            all_configs["max.message.bytes"] = str(min(max(known) + _MORE_HEADERS_BYTES, _MOST_BYTES))
        await self.create_topic(name, partitions or len(origin.partitions), origin.replication_factor, all_configs)

    async def list_groups(self) -> list[GroupInfo]:
        """Return every consumer group, sorted by name."""

        def request() -> list[Any]:
            client = self.group_client()
            listed = client.list_consumer_groups(request_timeout=self._limit).result()
            if listed.errors:  # of a broker that does not answer: its groups are missing
                raise library.KafkaException(listed.errors[0])
            names = sorted(group.group_id for group in listed.valid)
            return _results(client.describe_consumer_groups(names), self._limit, "Describe", "group") if names else []

        described = await self._request("list groups", request)
        return [GroupInfo(group.group_id, str(group.state.name).lower(), len(group.members)) for group in described]

    def group_client(self) -> library.AdminClient:
        """Return a new client for requests to coordinators of groups.

        One that knows a coordinator calls it for minutes after it has moved, and for good if a request was late there.
        """
        return self._security.make()

    async def group_members(self, group: str, right: str = "Describe") -> list[GroupMember]:
        """Return the members of a group; none if there is no such group. `right` is what the caller needs on it."""
        return (await self.members_of([group], right))[group]

    async def members_of(self, groups: Sequence[str], right: str = "Describe") -> dict[str, list[GroupMember]]:
        """Return the members of each of these groups, with one client for all."""
        names = [check_group(group) for group in groups]

        def request() -> list[Any]:
            client = self.group_client()
            return [(name, self._members(name, f, right)) for name, f in client.describe_consumer_groups(names).items()]

        return dict(await self._of_group(f"list the members of group {names_of(names)}", request)) if names else {}

    def _members(self, group: str, future: Any, right: str) -> list[GroupMember]:
        try:
            return [GroupMember.of(m) for m in _result(future, self._limit, Right(right, "group", group)).members]
        except library.KafkaException as cause:
            if cause.args[0].code() == library.KafkaError.GROUP_ID_NOT_FOUND:
                return []
            raise

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """Return the committed offsets of a group on topics that exist: the next ones after a restart."""
        return {partition: offset for partition, (offset, _) in (await self.commits(group)).items()}

    async def commits(self, group: str) -> dict[TopicPartition, tuple[int, str]]:
        """Return the committed offsets of a group on topics that exist, each with its metadata.

        A client of that group sends the request. That of an admin client crashes the process when the group's
        coordinator has moved, as in every rolling restart of brokers. Source: librdkafka, issue 5040.
        """
        partitions = [
            library.TopicPartition(topic.name, info.partition)
            for topic in await self.list_topics()
            for info in topic.partitions
        ]
        properties = {
            **_properties(self.config, self.reachability),
            "group.id": check_group(group),
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",  # do not wait for a transaction that commits offsets
        }

        def request() -> list[Any]:
            client = library.Consumer(properties)
            try:
                return client.committed(partitions, timeout=self._limit)
            finally:
                client.close()

        right = Right("Describe", "group", group)
        entries = await self._of_group(f"read offsets of group {group}", request, right) if partitions else []
        return {TopicPartition(e.topic, e.partition): (e.offset, e.metadata or "") for e in entries if e.offset >= 0}

    async def alter_group_offsets(self, group: str, offsets: Offsets) -> None:
        """Set committed offsets of a group without members.

        Raises:
            KafkaError: The group has members, or a partition does not exist.
        """
        targets = [library.TopicPartition(p.topic, p.partition, offset) for p, offset in offsets.items()]
        changes = [library.ConsumerGroupTopicPartitions(check_group(group), targets)]

        def request() -> list[Any]:
            client = self.group_client()
            return list(_results(client.alter_consumer_group_offsets(changes), self._limit)[0].topic_partitions)

        needed = [Right("Read", "group", group), *(Right("Read", "topic", p.topic) for p in offsets)]
        await self._of_group(f"set offsets of group {group}", request, *dict.fromkeys(needed))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the end of each partition as a read_committed consumer sees it (the last stable offset)."""
        return await self._offsets(partitions, library.OffsetSpec.latest())  # type: ignore[no-untyped-call]

    async def known_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return what `end_offsets` does, without the partitions that do not exist."""
        latest = dict.fromkeys(partitions, library.OffsetSpec.latest())  # type: ignore[no-untyped-call]
        found = await self._listed(latest, _COMMITTED, _MISSING)
        return {partition: end.offset for partition, end in found.items()}

    async def written_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the end of each partition, including transactions that are open."""
        return await self._offsets(partitions, library.OffsetSpec.latest(), _UNCOMMITTED)  # type: ignore[no-untyped-call]

    async def offsets_since(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        """Return the first offset at or after a timestamp; partitions without one are left out."""
        return await self.offsets_at(dict.fromkeys(partitions, timestamp_ms))

    async def offsets_at(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return what `offsets_since` does, with a timestamp for each partition."""
        # To Kafka a negative timestamp is not a time: -1 requests the end.
        specs = {p: library.OffsetSpec.for_timestamp(max(0, at)) for p, at in times_ms.items()}
        found = await self._listed(specs, _UNCOMMITTED)
        return {partition: known.offset for partition, known in found.items() if known.offset >= 0}

    async def start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset that is still in each partition."""
        return await self._offsets(partitions, library.OffsetSpec.earliest())  # type: ignore[no-untyped-call]

    async def time_bounds(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Return the first record's and the greatest timestamp (ms) of each partition that holds any; reads no record.

        Source: KIP-734 (a request to the broker for the greatest timestamp).
        """
        first = await self._listed(dict.fromkeys(partitions, library.OffsetSpec.for_timestamp(0)), _UNCOMMITTED)
        latest = library.OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]
        last = await self._listed(dict.fromkeys(partitions, latest), _UNCOMMITTED)
        return {p: (first[p].timestamp, last[p].timestamp) for p in partitions if first[p].offset >= 0}

    async def topic_offsets(self, name: str, right: str = "Describe") -> dict[TopicPartition, tuple[int, int]]:
        """Return start and end offset of every partition of a topic; `right` is what the caller needs on it."""
        topic = await self.describe_topic(name, right)
        partitions = [TopicPartition(name, info.partition) for info in topic.partitions]
        starts = await self.start_offsets(partitions)
        ends = await self.end_offsets(partitions)
        return {partition: (starts[partition], ends[partition]) for partition in partitions}

    async def _offsets(
        self,
        partitions: Iterable[TopicPartition],
        spec: library.OffsetSpec,
        isolation: library.IsolationLevel = _COMMITTED,
    ) -> dict[TopicPartition, int]:
        found = await self._listed(dict.fromkeys(partitions, spec), isolation)
        return {partition: known.offset for partition, known in found.items()}

    async def _listed(
        self,
        of_partitions: Mapping[TopicPartition, Any],
        isolation: library.IsolationLevel,
        left_out: Collection[int] = (),
    ) -> dict[TopicPartition, Any]:
        specs = {library.TopicPartition(*p): spec for p, spec in of_partitions.items()}
        if not specs:
            return {}

        def request() -> dict[TopicPartition, Any]:
            responses = self._client.list_offsets(specs, isolation_level=isolation, request_timeout=self._limit)
            return {
                TopicPartition(p.topic, p.partition): _result(future, self._limit, Right("Describe", "topic", p.topic))
                for p, future in responses.items()
                if _code(future, self._limit) not in left_out
            }

        end = asyncio.get_running_loop().time() + self._limit
        while True:
            try:
                return await self._request("read offsets", request)
            except errors.KafkaUnavailable:  # also when a leader has moved, or its connection has just ended
                if not self.reachability.is_reachable or asyncio.get_running_loop().time() > end:
                    raise
            except errors.KafkaError as error:
                ids = await self.topic_ids({p.topic for p in specs})  # without Describe it is also "no leader"
                if error.parameters.get("kafka_code") == _NO_LEADER:
                    missing = [p.topic for p in specs if p.topic not in ids]
                    kind = errors.TopicNotFound if missing else errors.PartitionNotFound
                    raise kind(f"read offsets: {', '.join(missing[:1]) or 'a partition'} does not exist") from error
                raise
            await asyncio.sleep(_MOVE_PAUSE_SECONDS)

    async def _of_group(self, doing: str, call: Callable[[], list[Any]], *needed: Right) -> list[Any]:
        """Request partitions or members from a group's coordinator; retry while the coordinator moves or loads."""
        end = asyncio.get_running_loop().time() + self._limit
        while True:
            error: errors.HeadraceError
            try:
                entries = await self._request(doing, call, needed=needed)
            except errors.KafkaUnavailable as cause:
                error = cause
            else:
                failed = next((entry for entry in entries if getattr(entry, "error", None)), None)
                if failed is None:
                    return entries
                named = [right for right in needed if right.name in (failed.topic, "") or right.kind != "topic"]
                error = to_error(failed.error, f"{doing}, {failed.topic}-{failed.partition}", self.config, *named)
            if not isinstance(error, errors.KafkaUnavailable) or asyncio.get_running_loop().time() > end:
                raise error
            await asyncio.sleep(_MOVE_PAUSE_SECONDS)

    async def _first(self, doing: str, call: Callable[[], Mapping[Any, Any]], right: Right) -> Any:
        return (await self._request(doing, lambda: _results(call(), self._limit), needed=[right]))[0]

    async def _request(
        self, doing: str, call: Callable[[], T], limit_seconds: float | None = None, needed: Sequence[Right] = ()
    ) -> T:
        limit = limit_seconds or self._limit
        timer = asyncio.get_running_loop().call_later(_WAIT_SECONDS, self._log_waiting, limit)
        try:
            if not self.reachability.is_reachable:
                await self._reach(doing, limit)
            response = await run_blocking(self._call, call)
            self.reachability.answered()
            return response
        except library.KafkaException as cause:
            error = to_error(cause, doing, self.config, *(cause.args[1:] or needed))
            if isinstance(error, errors.KafkaTimeout | errors.KafkaUnavailable):
                raise self._unavailable(doing, limit) from cause
            raise error from cause
        except TimeoutError as cause:
            raise self._unavailable(doing, limit) from cause
        finally:
            timer.cancel()
            self._client.poll(0)  # serves `error_cb`, and the client's log

    async def _reach(self, doing: str, limit_seconds: float) -> None:
        """Wait until a broker answers, so that a refused client fails early."""
        loop = asyncio.get_running_loop()
        attempt = _FIRST_ATTEMPT_SECONDS
        began = loop.time()
        while True:
            rest = began + limit_seconds - loop.time()
            try:
                seconds = max(0.01, min(attempt, rest))
                await run_blocking(self._call, lambda limit=seconds: self._client.list_topics(timeout=limit))
                return
            except library.KafkaException:
                self._client.poll(0)
            problem = self.reachability.problem()
            waited = loop.time() - began
            # A command is started again by its user; a service waits for a broker that starts.
            hopeless = Admin.on_wait is not None and self.reachability.no_listener
            unsure = problem is not None and (bool(problem.fix) or hopeless) and waited >= _UNSURE_SECONDS
            if (problem and problem.refused) or unsure or waited >= limit_seconds:
                raise self._unavailable(doing, min(limit_seconds, round(waited, 1)))
            attempt *= 2

    def _call(self, call: Callable[[], T]) -> T:
        """Make a call on a thread of the pool, with the certificates and secrets that are in use now."""
        before = self._client  # kept for the call, and released on this thread, because that may block
        if (replacement := self._security.replacement(before)) is not None:  # it has a length, which is 0
            self._client = replacement
        return call()

    def _log_waiting(self, limit_seconds: float) -> None:
        self._client.poll(0)
        if Admin.on_wait:
            why = self.reachability.problem() or "no response yet"
            Admin.on_wait(f"waiting up to {limit_seconds:g} s for Kafka at {self.servers}: {why}")

    def _unavailable(self, doing: str, limit_seconds: float) -> errors.KafkaUnavailable:
        self._client.poll(0)
        problem = self.reachability.problem()
        if problem and problem.fix:
            text = f"{doing}: no response from Kafka at {self.servers}: {problem}"
        else:
            text = (
                f"{doing}: no response from Kafka at {self.servers} within {limit_seconds:g} s"
                f"{f': {problem}' if problem else ''}. "
                "Start it (headrace dev up) or correct kafka.bootstrap_servers"
            )
        return errors.KafkaUnavailable(text, bootstrap_servers=self.servers)


def _properties(kafka: KafkaConfig, reachability: Reachability) -> dict[str, Any]:
    return {**client_properties(kafka, "headrace-admin"), "error_cb": reachability.failed}


def _results(futures: Mapping[Any, Any], limit_seconds: float, operation: str = "", kind: Kind = "topic") -> list[Any]:
    """Return the results of a request for several; an operation names the right to each of them."""
    return [
        _result(future, limit_seconds, Right(operation, kind, key)) if operation else future.result(limit_seconds)
        for key, future in futures.items()
    ]


def _result(future: Any, limit_seconds: float, right: Right) -> Any:
    try:
        return future.result(limit_seconds)
    except library.KafkaException as cause:
        if is_refused(cause.args[0]):
            raise library.KafkaException(cause.args[0], right) from cause
        raise


def _code(future: Any, limit_seconds: float) -> int | None:
    error = future.exception(limit_seconds)
    return error.args[0].code() if isinstance(error, library.KafkaException) else None


def _missing_brokers(metadata: Any) -> list[int]:
    partitions = [partition for topic in metadata.topics.values() for partition in topic.partitions.values()]
    return sorted({broker for partition in partitions for broker in partition.replicas} - metadata.brokers.keys())


def _topic_info(topic: Any) -> TopicInfo:
    partitions = [
        PartitionInfo(info.id, info.leader, tuple(info.replicas), tuple(info.isrs))
        for info in topic.partitions.values()
    ]
    return TopicInfo(topic.topic, sorted(partitions))
