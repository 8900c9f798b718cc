"""Services, their supervision, time, threads and processes: tasks, threads and processes start only here."""

from headrace.lifecycle.clock import Clock, Deadline, RestartPauses, SystemClock, TokenBucket, next_slice
from headrace.lifecycle.gauge_registry import gauges
from headrace.lifecycle.processes import Child, ChildProcess, run_program, start_child
from headrace.lifecycle.restarted import RestartedServices
from headrace.lifecycle.service import Readiness, Service
from headrace.lifecycle.service_groups import GroupSpec, ServiceGroups
from headrace.lifecycle.supervisor import Signals, Supervisor, run_while
from headrace.lifecycle.threads import LoopBridge, LoopThread, OwnedThread, run_blocking
