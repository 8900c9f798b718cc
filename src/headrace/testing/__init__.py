"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace.devcluster import Cluster, Registry

__all__ = ["Cluster", "Registry"]
