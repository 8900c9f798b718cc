"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace.devcluster import Cluster, HeadraceProcess, PlannedResponse, Received, RecordingBackend, Registry
from headrace.testing.fixture_types import MakeTopic, SharedHeadrace, StartHeadrace
from headrace.testing.history import Attempt, Commit, Operation, PauseSpan, Pushed, Seek, Skip
from headrace.testing.ledger import Fault, Sent, check_produced
from headrace.testing.manual_clock import ManualClock
from headrace.testing.pipelines import PipelineRows
from headrace.testing.proxy import FaultProxy
from headrace.testing.push_ledger import check_pushed

__all__ = [
    "Attempt",
    "Cluster",
    "Commit",
    "Fault",
    "FaultProxy",
    "HeadraceProcess",
    "MakeTopic",
    "ManualClock",
    "Operation",
    "PauseSpan",
    "PipelineRows",
    "PlannedResponse",
    "Pushed",
    "Received",
    "RecordingBackend",
    "Registry",
    "Seek",
    "Sent",
    "SharedHeadrace",
    "Skip",
    "StartHeadrace",
    "check_produced",
    "check_pushed",
]
