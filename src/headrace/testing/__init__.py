"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace.devcluster import Cluster, HeadraceProcess, Registry
from headrace.testing.backend import Answer, Received, RecordingBackend
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
