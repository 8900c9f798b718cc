"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace.devcluster import Answer, Cluster, HeadraceProcess, Received, RecordingBackend, Registry
from headrace.testing.ledger import Fault, Sent, check_produced

__all__ = [
    "Answer",
    "Cluster",
    "Fault",
    "HeadraceProcess",
    "Received",
    "RecordingBackend",
    "Registry",
    "Sent",
    "check_produced",
]
