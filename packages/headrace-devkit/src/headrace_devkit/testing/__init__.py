"""Public test tools: a real Kafka, a clean Headrace process, a backend that records. The product never imports it."""

from headrace_devkit.devcluster import Cluster, HeadraceProcess, PlannedResponse, Received, RecordingBackend, Registry
from headrace_devkit.testing.fixture_types import MakeTopic, SharedHeadrace, StartHeadrace
from headrace_devkit.testing.history import Attempt, Commit, Operation, PauseSpan, Pushed, Seek, Skip
from headrace_devkit.testing.ledger import Fault, Sent, check_produced
from headrace_devkit.testing.manual_clock import ManualClock
from headrace_devkit.testing.pipelines import PipelineRows
from headrace_devkit.testing.proxy import FaultProxy
from headrace_devkit.testing.push_ledger import check_pushed

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
