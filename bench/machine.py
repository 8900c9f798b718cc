"""What /proc knows about a measurement: processor time of a process and its children, stolen time, resident memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessTimes(NamedTuple):
    """One process in /proc/PID/stat."""

    pid: int
    parent: int
    ticks: int
    """Processor time of the process, and of its children that have ended."""


class MachineTimes(NamedTuple):
    """The first line of /proc/stat."""

    total_ticks: int
    stolen_ticks: int
    """Time in which the hypervisor ran another machine on a processor that this one could have used."""
    used_ticks: int
    """Time of processes, without that of interrupts."""


class Used(NamedTuple):
    """What a meter found."""

    cpu_seconds: float
    """Processor time of the process and its children."""
    stolen: float
    """Share of the machine's time that the hypervisor gave to others."""
    others: float
    """Share of one processor that processes took which this run did not start."""


def process_times(stat: str) -> ProcessTimes:
    """Parse /proc/PID/stat; the command's name may hold blanks and brackets."""
    fields = stat[stat.rindex(")") + 2 :].split()
    return ProcessTimes(int(stat.split(maxsplit=1)[0]), int(fields[1]), sum(map(int, fields[11:15])))


def machine_times(stat: str) -> MachineTimes:
    """Parse /proc/stat; guest time is part of user time and is not added again."""
    ticks = list(map(int, stat.split("\n", 1)[0].split()[1:9]))
    return MachineTimes(sum(ticks), ticks[7], sum(ticks[:3]))


def tree_ticks(root: int, processes: Iterable[ProcessTimes]) -> int:
    """Return the processor time of a process and of all below it."""
    children: dict[int, list[ProcessTimes]] = {}
    found = 0
    for one in processes:
        children.setdefault(one.parent, []).append(one)
        found += one.ticks if one.pid == root else 0
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += sum(one.ticks for one in below)
        waiting += [one.pid for one in below]
    return found


def running_processes() -> list[ProcessTimes]:
    """Return every process of the machine; one that ends meanwhile is left out."""
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                found.append(process_times((folder / "stat").read_text()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def children_seconds() -> float:
    """Return the processor time of the ended children of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """Return the resident memory of a process; `VmHWM` is its peak."""
    status = (PROC / str(pid) / "status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:")) / 1024


def forget_peak_memory(pid: int) -> None:
    """Let `VmHWM` begin again at the present resident memory."""
    (PROC / str(pid) / "clear_refs").write_text("5")


class Meter:
    """Measures from when it is made until `used`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.start = time.perf_counter()
        self.ticks, self.run_ticks, self.machine = self.now()

    def now(self) -> tuple[int, int, MachineTimes]:
        """Return the ticks of the process, of all processes of this run, and of the machine."""
        processes = running_processes()
        ticks, run_ticks = (tree_ticks(root, processes) for root in (self.pid, os.getpid()))
        return ticks, run_ticks, machine_times((PROC / "stat").read_text())

    def used(self) -> Used:
        """Return what was used since then."""
        ticks, run_ticks, machine = self.now()
        total, stolen, busy = (now - then for now, then in zip(machine, self.machine, strict=True))
        others = (busy - run_ticks + self.run_ticks) / TICKS_PER_SECOND / (time.perf_counter() - self.start)
        return Used((ticks - self.ticks) / TICKS_PER_SECOND, stolen / max(1, total), max(0.0, others))
