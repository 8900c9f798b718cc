"""Creates, changes and deletes topics, and shows configurations, groups and brokers to administrators.

What the cluster rejects because of the request is InvalidRequest, with what to do.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from headrace import errors
from headrace.kafka.admin import Admin
from headrace.kafka.client import library
from headrace.kafka.client.access import Right
from headrace.kafka.names import check_group, check_topic, names_of

_Error = library.KafkaError
_ADVICE: Final = {
    _Error.TOPIC_ALREADY_EXISTS: "change it with PATCH or headrace topics alter, or choose another name",
    _Error.INVALID_CONFIG: "correct it; GET /topics/{topic}/configs lists the names and values in use",
    _Error.INVALID_PARTITIONS: "pass the new total, which is larger: Kafka cannot remove partitions",
    _Error.INVALID_REPLICATION_FACTOR: "use at most the number of brokers",
    _Error.INVALID_REQUEST: "correct the request",
    _Error.POLICY_VIOLATION: "the cluster's policy or limits forbid it: ask its operator, or request less",
    _Error.TOPIC_EXCEPTION: "choose another name: Kafka takes dots and underscores for the same in metrics",
    _Error.TOPIC_DELETION_DISABLED: "set delete.topic.enable on the brokers",
}
"""Kafka's errors that the request causes, with what to do."""
_SETTLED: Final = ("stable", "empty", "dead")
"""States of a group that waits for no member."""


class TopicConfig(msgspec.Struct, order=True):
    """A configuration of a topic."""

    name: str
    value: str | None
    """None if it is sensitive."""
    is_default: bool
    source: str
    """Where it is set: `dynamic_topic_config`, `static_broker_config`, `default_config` or another of Kafka's words."""
    read_only: bool


class GroupDetails(NamedTuple):
    """A group as its coordinator describes it; `members` are the client's."""

    state: str
    protocol: str
    assignor: str
    coordinator: int | None
    members: Sequence[Any]


async def rebalance_of(admin: Admin, group: str, since: float) -> str:
    """Return since when a group rebalances, and its members; empty if it does not. `since` is in seconds of 1970."""
    when = f"since {datetime.fromtimestamp(since, UTC):%Y-%m-%dT%H:%M:%SZ}"
    try:
        found = await ClusterAdmin(admin).group(group)
    except errors.HeadraceError as cause:
        return f"group {group}: no partitions assigned {when}: {cause.description}"
    if found is None or found.state in _SETTLED:
        return ""
    members = names_of(sorted(f"{each.client_id} at {each.host.lstrip('/')}" for each in found.members))
    return f"group {group} has been rebalancing {when}; it waits for its members: {members}"


class ClusterAdmin:
    """Administration of the cluster of an `Admin`. Each call has the time limit of that one."""

    def __init__(self, admin: Admin) -> None:
        self.admin = admin

    async def create(
        self, name: str, partitions: int, replication_factor: int, configs: Mapping[str, str], *, dry_run: bool
    ) -> None:
        """Create a topic; -1 is the broker's default replication factor. With `dry_run` the broker only checks it."""
        topic = library.NewTopic(check_topic(name), partitions, replication_factor, config=dict(configs))
        await self._change(
            f"create topic {name}",
            lambda client, limit: client.create_topics([topic], validate_only=dry_run, request_timeout=limit),
            Right("Create", "topic", name),
        )

    async def delete(self, name: str) -> None:
        """Delete a topic with its records.

        Raises:
            TopicNotFound: The cluster does not have it.
        """
        await self._change(
            f"delete topic {check_topic(name)}",
            lambda client, limit: client.delete_topics([name], request_timeout=limit),
            Right("Delete", "topic", name),
        )

    async def configs(self, name: str) -> list[TopicConfig]:
        """Return every configuration of a topic, sorted by name."""
        resource = library.ConfigResource(library.ResourceType.TOPIC, check_topic(name))
        entries = await self._change(
            f"describe topic {name}",
            lambda client, limit: client.describe_configs([resource], request_timeout=limit),
            Right("DescribeConfigs", "topic", name),
        )
        sources = library.ConfigSource
        return sorted(
            TopicConfig(e.name, e.value, bool(e.is_default), sources(e.source).name.lower(), bool(e.is_read_only))
            for e in entries.values()
        )

    async def alter_configs(self, name: str, configs: Mapping[str, str | None], *, dry_run: bool) -> None:
        """Set configurations of a topic; None restores the default. Others keep their values."""
        kinds = library.AlterConfigOpType
        entries = [
            library.ConfigEntry(key, value, incremental_operation=kinds.DELETE if value is None else kinds.SET)
            for key, value in configs.items()
        ]
        resource = library.ConfigResource(library.ResourceType.TOPIC, check_topic(name), incremental_configs=entries)
        await self._change(
            f"alter topic {name}",
            lambda client, limit: client.incremental_alter_configs(
                [resource], validate_only=dry_run, request_timeout=limit
            ),
            Right("AlterConfigs", "topic", name),
        )

    async def add_partitions(self, name: str, total: int, *, dry_run: bool) -> None:
        """Raise the number of a topic's partitions to a total."""
        change = library.NewPartitions(check_topic(name), total)
        await self._change(
            f"add partitions to topic {name}",
            lambda client, limit: client.create_partitions([change], validate_only=dry_run, request_timeout=limit),
            Right("Alter", "topic", name),
        )

    async def group(self, name: str) -> GroupDetails | None:
        """Return a group; None if the cluster does not know it."""

        def describe(_client: library.AdminClient, limit: float) -> Any:
            client = self.admin.group_client()
            return client.describe_consumer_groups([name], request_timeout=limit)[name].result(limit)

        try:
            found = await self.admin.request(
                f"describe group {check_group(name)}", describe, Right("Describe", "group", name)
            )
        except errors.KafkaError as error:
            if error.parameters.get("kafka_code") == _Error.GROUP_ID_NOT_FOUND:
                return None
            raise
        state = found.state.name.lower()
        if state == "dead":
            return None
        coordinator = found.coordinator.id if found.coordinator else None
        return GroupDetails(state, found.type.name.lower(), found.partition_assignor, coordinator, found.members)

    async def brokers(self) -> Any:
        """Return the client's description of the cluster: its id, controller and nodes."""
        return await self.admin.request(
            "describe the cluster",
            lambda client, limit: client.describe_cluster(request_timeout=limit).result(limit),
            Right("Describe", "cluster"),
        )

    async def _change(
        self, doing: str, call: Callable[[library.AdminClient, float], Mapping[Any, Any]], right: Right
    ) -> Any:
        def request(client: library.AdminClient, limit: float) -> Any:
            (future,) = call(client, limit).values()
            return future.result(limit)

        try:
            return await self.admin.request(doing, request, right)
        except (errors.KafkaError, errors.TopicNotFound) as error:
            advice = _ADVICE.get(error.parameters.get("kafka_code", 0))
            if advice is None:
                raise
            raise errors.InvalidRequest(f"{error.cause}: {advice}") from error
