"""Real Kafka, a schema registry, Headrace and a backend, on this machine. A companion: the product never imports it."""

from headrace.devcluster.cluster import Cluster
from headrace.devcluster.detached import DevCluster
from headrace.devcluster.group import start_together
from headrace.devcluster.headrace import HeadraceProcess
from headrace.devcluster.recording_backend import PlannedResponse, Received, RecordingBackend
from headrace.devcluster.registry_server import Registry

__all__ = [
    "Cluster",
    "DevCluster",
    "HeadraceProcess",
    "PlannedResponse",
    "Received",
    "RecordingBackend",
    "Registry",
    "start_together",
]
