"""How things live: the only place where tasks, threads and processes are born."""

from headrace.lifecycle.clock import Clock, Deadline, ManualClock, SystemClock
from headrace.lifecycle.gauge_registry import gauges
from headrace.lifecycle.processes import Child, ChildProcess, run_program, start_child
from headrace.lifecycle.service import Readiness, Service
from headrace.lifecycle.service_groups import GroupSpec, ServiceGroups
from headrace.lifecycle.supervisor import Signals, Supervisor
from headrace.lifecycle.threads import LoopBridge, LoopThread, OwnedThread, run_blocking
from headrace.lifecycle.turns import next_slice

__all__ = [
    "Child",
    "ChildProcess",
    "Clock",
    "Deadline",
    "GroupSpec",
    "LoopBridge",
    "LoopThread",
    "ManualClock",
    "OwnedThread",
    "Readiness",
    "Service",
    "ServiceGroups",
    "Signals",
    "Supervisor",
    "SystemClock",
    "gauges",
    "next_slice",
    "run_blocking",
    "run_program",
    "start_child",
]
