"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace.devcluster import Cluster, Registry
from headrace.testing.backend import Answer, Received, RecordingBackend
from headrace.testing.process import HeadraceProcess

__all__ = ["Answer", "Cluster", "HeadraceProcess", "Received", "RecordingBackend", "Registry"]
