"""The endpoints of Kafka administration of one process."""

from headrace.admin.cluster.group_administration import GroupAdministration
from headrace.admin.cluster.registered_schemas import RegisteredSchemas
from headrace.admin.cluster.routes import ClusterEndpoints
from headrace.admin.cluster.schema_routes import SchemaEndpoints
from headrace.admin.cluster.topic_administration import TopicAdministration
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.kafka.cluster_admin import ClusterAdmin
from headrace.process_context import ProcessContext
from headrace.runtime.feature_parts import NeededParts, Parts


class ClusterParts(Parts):
    """The endpoints of topics, groups, the cluster and schemas."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        admin, kind_of = context.admin, needed.of(ConsumersParts).internal.kind_of
        topics, groups = TopicAdministration(admin, kind_of), GroupAdministration(admin, kind_of, context.clock)
        self.endpoints = [
            ClusterEndpoints(topics, groups, ClusterAdmin(admin)),
            SchemaEndpoints(RegisteredSchemas(context.registry)),
        ]
