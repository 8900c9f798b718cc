"""`/topics`, `/groups` and `/cluster`: administration of the Kafka cluster of this process."""

from typing import Any, Final

import msgspec

from headrace import errors
from headrace.admin.cluster.cluster_view import ClusterView, view_cluster
from headrace.admin.cluster.group_administration import (
    GroupAdministration,
    GroupList,
    GroupView,
    OffsetsRequest,
    OffsetsResponse,
)
from headrace.admin.cluster.topic_administration import (
    NewTopicRequest,
    TopicAdministration,
    TopicChangeRequest,
    TopicChanges,
    TopicConfigs,
    TopicView,
)
from headrace.http.auth.principals import ADMIN, READ
from headrace.http.endpoint import ADMINISTER, KAFKA, Call, CallEvent, Endpoint, Errors, Rule
from headrace.http.messages import HttpResponse
from headrace.kafka import check_group, check_topic
from headrace.kafka.cluster_admin import ClusterAdmin

_READERS: Final = (READ, ADMIN)
_TOPIC: Final = "/topics/{topic}"
_GROUP: Final = "/groups/{group}"
_READ_TOPIC: Final = Rule(_READERS, "consume", "topic")
_READ_GROUP: Final = Rule(_READERS, "group", "group")
_ERRORS: Final[Errors] = (*KAFKA, errors.NotFound, errors.InvalidRequest)
_CHANGE: Final[Errors] = (*_ERRORS, errors.TopicInternal)


class DeleteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The confirmation of a deletion."""

    confirm: str = ""
    """The name of the topic again."""


class ClusterEndpoints:
    """Administration of topics, groups and the cluster. Reading takes a scope of the topic or group."""

    def __init__(self, topics: TopicAdministration, groups: GroupAdministration, cluster: ClusterAdmin) -> None:
        self._topics = topics
        self._groups = groups
        self._cluster = cluster

    @Endpoint(
        "GET",
        "/topics",
        "listTopics",
        "Names of the topics that the caller may read, as the Confluent REST Proxy v2 lists them",
        Rule(_READERS, "consume"),
        errors=KAFKA,
    )
    async def list_topics(self, call: Call[None, None]) -> list[str]:
        return [name for name in await self._topics.names() if _may(call, "consume", name)]

    @Endpoint(
        "POST",
        "/topics",
        "createTopic",
        "Create a topic",
        ADMINISTER,
        {200: TopicChanges, 201: TopicChanges},
        example={"name": "orders", "partitions": 5, "configs": {"retention.ms": 864000000}, "dry_run": True},
        errors=_CHANGE,
        audited="create topic",
    )
    async def create_topic(self, call: Call[NewTopicRequest, None]) -> HttpResponse:
        self._topics.check_changeable(call.body.name)
        _audit(call, call.body.name, dry_run=call.body.dry_run)
        changes = await self._topics.create(call.body)
        return HttpResponse(changes, 200 if call.body.dry_run else 201)

    @Endpoint("GET", _TOPIC, "showTopic", "Partitions, replicas, offsets of a topic", _READ_TOPIC, errors=_ERRORS)
    async def show_topic(self, call: Call[None, None]) -> TopicView:
        return await self._topics.show(check_topic(call.parameters["topic"]))

    @Endpoint(
        "PATCH",
        _TOPIC,
        "alterTopic",
        "Change configurations of a topic, add partitions",
        ADMINISTER,
        example={"configs": {"retention.ms": 86400000}, "dry_run": True},
        errors=_CHANGE,
        audited="alter topic",
    )
    async def alter_topic(self, call: Call[TopicChangeRequest, None]) -> TopicChanges:
        name = call.parameters["topic"]
        self._topics.check_changeable(name)
        _audit(call, name, dry_run=call.body.dry_run)
        return await self._topics.change(name, call.body)

    @Endpoint(
        "DELETE",
        _TOPIC,
        "deleteTopic",
        "Delete a topic with its records; `confirm` repeats its name",
        ADMINISTER,
        errors=_CHANGE,
        audited="delete topic",
    )
    async def delete_topic(self, call: Call[None, DeleteQuery]) -> None:
        name = call.parameters["topic"]
        self._topics.check_changeable(name)
        if call.query.confirm != name:
            raise errors.InvalidRequest(f"to delete {name} with its records, repeat its name: ?confirm={name}")
        call.event = CallEvent(name)
        await self._topics.delete(name)

    @Endpoint("GET", f"{_TOPIC}/configs", "getTopicConfigs", "Configurations of a topic", _READ_TOPIC, errors=_ERRORS)
    async def topic_configs(self, call: Call[None, None]) -> TopicConfigs:
        return await self._topics.configs(check_topic(call.parameters["topic"]))

    @Endpoint(
        "GET",
        "/groups",
        "listGroups",
        "Consumer groups that the caller may read",
        Rule(_READERS, "group"),
        errors=KAFKA,
    )
    async def list_groups(self, call: Call[None, None]) -> GroupList:
        return GroupList([one for one in await self._groups.summaries() if _may(call, "group", one.group)])

    @Endpoint(
        "GET", _GROUP, "showGroup", "Members, assignment, offsets and lag of a group", _READ_GROUP, errors=_ERRORS
    )
    async def show_group(self, call: Call[None, None]) -> GroupView:
        return await self._groups.show(call.parameters["group"])

    @Endpoint(
        "POST",
        f"{_GROUP}/offsets",
        "resetOffsets",
        "Set the committed offsets of a group without members",
        ADMINISTER,
        example={"to": "earliest", "topic": "orders", "dry_run": True},
        errors=(*_CHANGE, errors.CommitRefused),
        audited="reset offsets",
    )
    async def reset_offsets(self, call: Call[OffsetsRequest, None]) -> OffsetsResponse:
        group = check_group(call.parameters["group"])
        _audit(call, f"group {group}", dry_run=call.body.dry_run)
        return await self._groups.reset(group, call.body)

    @Endpoint("GET", "/cluster", "showCluster", "Brokers and controller", ADMINISTER, errors=KAFKA)
    async def show_cluster(self, call: Call[None, None]) -> ClusterView:
        return await view_cluster(self._cluster)


def _may(call: Call[Any, Any], action: str, name: str) -> bool:
    principal = call.request.caller.principal
    return principal is None or principal.may(_READERS, action, name)


def _audit(call: Call[Any, Any], target: str, *, dry_run: bool) -> None:
    """Write an audit event with what is requested, unless it is a preview."""
    if not dry_run:
        fields = {
            name: value for name, value in msgspec.to_builtins(call.body).items() if value not in (None, {}, False)
        }
        fields.pop("name", None)
        call.event = CallEvent(target, detail=msgspec.json.encode(fields).decode())
