"""Real Kafka, a schema registry, Headrace and a backend, on this machine. A companion: the product never imports it."""

from headrace_devkit.devcluster.cluster import Cluster
from headrace_devkit.devcluster.detached import DevCluster
from headrace_devkit.devcluster.group import start_together
from headrace_devkit.devcluster.headrace import HeadraceProcess
from headrace_devkit.devcluster.recording_backend import PlannedResponse, Received, RecordingBackend
from headrace_devkit.devcluster.registry_server import Registry

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
