"""Real Apache Kafka and a schema registry as local processes. A companion: the product never imports it."""

from headrace.devcluster.cluster import Cluster
from headrace.devcluster.detached import DevCluster, environment
from headrace.devcluster.registry import Registry

__all__ = ["Cluster", "DevCluster", "Registry", "environment"]
