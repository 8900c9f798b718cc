"""What Kafka's client says of a cluster: its brokers, its controller, and its access rules."""

import msgspec

from headrace.errors import KafkaUnauthorized
from headrace.kafka.cluster_admin import ClusterAdmin, client_version


class BrokerView(msgspec.Struct):
    """A broker that is in the cluster now."""

    id: int
    host: str
    port: int
    rack: str | None
    controller: bool
    """Whether the client calls it for the controller; with KRaft it forwards the request to the controller."""


class AccessRule(msgspec.Struct):
    """An ACL, in Kafka's words."""

    principal: str
    host: str
    operation: str
    permission: str
    resource_type: str
    resource: str
    pattern: str


class ClusterView(msgspec.Struct):
    """A cluster."""

    cluster_id: str
    controller: int | None
    """Id of a broker; see `brokers.controller`."""
    brokers: list[BrokerView]
    client: str
    """Version of Headrace's Kafka client. It does not give the versions of brokers."""
    authorizer: bool
    """Whether the brokers check access rules."""
    access_rules: list[AccessRule]
    problem: str
    """Why the access rules are not listed; empty if they are."""


async def view_cluster(cluster: ClusterAdmin) -> ClusterView:
    """Return a cluster; without the right to read access rules, only these are left out."""
    found = await cluster.brokers()
    problem = ""
    try:
        rules = await cluster.access_rules()
    except KafkaUnauthorized as error:
        rules, problem = [], error.description
    controller = found.controller.id if found.controller else None
    brokers = [BrokerView(n.id, n.host, n.port, n.rack, n.id == controller) for n in found.nodes]
    shown = [
        AccessRule(
            rule.principal,
            rule.host,
            rule.operation.name.lower(),
            rule.permission_type.name.lower(),
            rule.restype.name.lower(),
            rule.name,
            rule.resource_pattern_type.name.lower(),
        )
        for rule in rules or ()
    ]
    brokers.sort(key=lambda broker: broker.id)
    return ClusterView(found.cluster_id or "", controller, brokers, client_version(), rules is not None, shown, problem)
