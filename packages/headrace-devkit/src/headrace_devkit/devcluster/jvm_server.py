"""One JVM of the dev cluster: started by us or found again by its process id, signalled, ended."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.errors import EnvironmentProblem, PortTaken
from headrace.runtime import start_child

_ADDRESS_TAKEN = ("Address already in use", "Port already bound", "seems to be in use")
_TRACE_LINES = 300
_END_SECONDS = 10.0
_EXITING = 0x4  # PF_EXITING of the kernel, include/linux/sched.h

_MOST_WAITS = 5
"""A server whose log grows may take this many times the limit."""


class StillStarting(EnvironmentProblem):
    """A server lives, and is not ready in time."""


class ServerId(NamedTuple):
    """A process that later commands can find again without mistaking another one for it."""

    pid: int
    started: str
    """When the kernel started it; a process id alone may have been given to another process since."""

    @property
    def running(self) -> bool:
        """Whether it lives; one that is ending does not."""
        found = _look(self.pid)
        return found.started == self.started and not found.is_ending

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left that holds its ports and files; a killed one holds them for up to seconds."""
        found = _look(self.pid)
        return found.started != self.started or found.has_ended


class StartedProcess(Protocol):
    """A child process, as much of `subprocess.Popen` as is used."""

    pid: int

    def poll(self) -> int | None: ...


class Server:
    """A JVM with a log file, in its own process group."""

    def __init__(self, name: str, log: Path, found: ServerId | None = None) -> None:
        """Name a server; its output is appended to `log`, and `found` is its process if there is one already."""
        self.name = name
        self.log = log
        self.id = found
        self._child: StartedProcess | None = None

    @property
    def running(self) -> bool:
        """Whether its process lives, paused or not."""
        if self._child:
            return self._child.poll() is None
        return self.id is not None and self.id.running

    @property
    def exit_code(self) -> int | None:
        """How it ended (negative: the signal), None while it runs or if this process did not start it."""
        return self._child.poll() if self._child else None

    def start(
        self, command: Sequence[str], *, detached: bool, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Start it; a detached one outlives this process."""
        self.adopt(start_child(command, output=self.log, die_with_parent=not detached, cwd=cwd, env=env))

    def adopt(self, process: StartedProcess) -> None:
        """Take a process that was just started, in a process group of its own."""
        self._child = process
        self.id = ServerId(process.pid, _look(process.pid).started)

    def signal(self, number: int) -> None:
        """Send a signal to its process group, if it lives."""
        if self.id and self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.id.pid, number)

    def ask_to_stop(self) -> None:
        """SIGTERM, after SIGCONT: a paused process keeps SIGTERM pending. Returns at once."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def stop(self, limit_seconds: float = 10.0) -> None:
        """End it properly, or by force after the limit."""
        self.ask_to_stop()
        self.wait_for_end(limit_seconds)
        self.kill()

    def kill(self) -> None:
        """End it by force, now."""
        self.signal(signal.SIGKILL)
        self.wait_for_end()

    def wait_until(self, ready: Callable[[], bool], limit_seconds: float) -> None:
        """Wait until `ready` is true; a connection error counts as not yet.

        The limit begins again whenever its log grows, up to five times the limit: a busy machine is slow.

        Raises:
            PortTaken: It ended because its port is in use.
            StillStarting: It is not ready in time; the text ends with its log's last lines.
            EnvironmentProblem: It ended.
        """
        begun = grown = time.monotonic()
        size = -1
        while True:
            with contextlib.suppress(OSError):
                if ready():
                    return
            if not self.running:
                raise self._problem("ended while it started")
            now, before = time.monotonic(), size
            size = self.log.stat().st_size if self.log.exists() else -1
            grown = now if size != before else grown
            if now > min(grown + limit_seconds, begun + _MOST_WAITS * limit_seconds):
                raise StillStarting(self._problem(f"was not ready within {now - begun:.0f} s").description)
            time.sleep(0.02)

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its log, without the frames of Java's stack traces."""
        with contextlib.suppress(OSError):
            kept = [line for line in self.log.read_text(errors="replace").splitlines() if not line.startswith("\tat ")]
            return "\n".join(kept[-lines:])
        return ""

    def _problem(self, what: str) -> EnvironmentProblem:
        tail = self.log_tail()
        # The sign may be far above the end: a Java stack trace comes after it.
        log = self.log_tail(_TRACE_LINES)
        kind = PortTaken if any(sign in log for sign in _ADDRESS_TAKEN) else EnvironmentProblem
        return kind(f"{self.name} {what}. Its log is {self.log}; the last lines are:\n{tail}")

    def wait_for_end(self, limit_seconds: float = _END_SECONDS) -> None:
        """Wait until it has ended and its ports and files are free, or until the time is up."""
        end = time.monotonic() + limit_seconds
        while (self.running or (self.id and not self.id.is_gone)) and time.monotonic() < end:
            time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that is ending does not."""
    return not _look(pid).is_ending


class _Process(NamedTuple):
    """What the kernel has of a process id."""

    started: str = ""
    """When it started; empty if there is none."""
    is_ending: bool = True
    """Whether it is a zombie, or on its way to be one."""
    has_ended: bool = True
    """Whether all of its threads have ended: the first can be a zombie while another frees memory, and holds ports."""


def _look(pid: int) -> _Process:
    """Look at a process.

    Source: proc_pid_stat(5), fields 3, 9, 20 and 22; counted from the last ")" since a name may hold anything.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _Process()
    is_zombie = fields[0] == "Z"
    is_ending = is_zombie or bool(int(fields[6]) & _EXITING)
    return _Process(fields[19], is_ending, is_zombie and int(fields[17]) <= 1)
