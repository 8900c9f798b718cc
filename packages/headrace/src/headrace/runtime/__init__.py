"""Services, their supervision, time, threads and processes: tasks, threads and processes start only here."""

from headrace.runtime.children import child_environment
from headrace.runtime.clock import Clock, Deadline, RestartPauses, SystemClock, TokenBucket, next_slice
from headrace.runtime.gauge_registry import gauges
from headrace.runtime.processes import Child, ChildProcess, group_command, run_program, start_child
from headrace.runtime.restarted import RestartedServices
from headrace.runtime.server_watch import ServerWatch, WatchedServer
from headrace.runtime.service import Readiness, Service
from headrace.runtime.service_groups import GroupSpec, ServiceGroups
from headrace.runtime.supervisor import Signals, Supervisor, run_while
from headrace.runtime.threads import LoopBridge, LoopThread, OwnedThread, ThreadPool, call_within, run_blocking
