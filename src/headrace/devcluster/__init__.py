"""Real Kafka, a schema registry and Headrace as local processes. A companion: the product never imports it."""

from headrace.devcluster.cluster import Cluster
from headrace.devcluster.detached import HOME, DevCluster, environment
from headrace.devcluster.group import start_together
from headrace.devcluster.headrace import HeadraceProcess
from headrace.devcluster.registry import Registry

__all__ = ["HOME", "Cluster", "DevCluster", "HeadraceProcess", "Registry", "environment", "start_together"]
