"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace.devcluster import Cluster, HeadraceProcess, Registry
from headrace.testing.backend import Answer, Received, RecordingBackend

__all__ = ["Answer", "Cluster", "HeadraceProcess", "Received", "RecordingBackend", "Registry"]
