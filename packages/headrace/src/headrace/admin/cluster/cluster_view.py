"""What Kafka's client says of a cluster: its brokers and its controller."""

import msgspec

from headrace.kafka import librdkafka_version
from headrace.kafka.cluster_admin import ClusterAdmin


class BrokerView(msgspec.Struct):
    """A broker that is in the cluster now."""

    id: int
    host: str
    port: int
    rack: str | None
    controller: bool
    """Whether the client calls it for the controller; with KRaft it forwards the request to the controller."""


class ClusterView(msgspec.Struct):
    """A cluster."""

    cluster_id: str
    controller: int | None
    """Id of a broker; see `brokers.controller`."""
    brokers: list[BrokerView]
    client: str
    """Version of Headrace's Kafka client. It does not give the versions of brokers."""


async def view_cluster(cluster: ClusterAdmin) -> ClusterView:
    """Return a cluster."""
    found = await cluster.brokers()
    controller = found.controller.id if found.controller else None
    brokers = [BrokerView(n.id, n.host, n.port, n.rack, n.id == controller) for n in found.nodes]
    brokers.sort(key=lambda broker: broker.id)
    return ClusterView(found.cluster_id or "", controller, brokers, f"librdkafka {librdkafka_version()}")
