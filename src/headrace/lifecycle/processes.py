"""Child processes: started by exec with an explicit command, in their own process group, dying with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from headrace.lifecycle.clock import Deadline
from headrace.lifecycle.service import Service

_LAUNCH = str(Path(__file__).with_name("launch.py"))


def launch_command(command: Sequence[str], die_with_parent: bool) -> list[str]:
    """Return the command that runs `command`, wrapped so that it dies with this process if asked."""
    if not die_with_parent:
        return list(command)
    return [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), *command]


class Child:
    """A child process for callers without a loop (the dev cluster, the command line, test fixtures)."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.popen = popen

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    def signal(self, number: int) -> None:
        """Send a signal to the child's whole process group; a child that has ended is fine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        """SIGKILL the group and wait for the child's end."""
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def terminate(self, limit_seconds: float) -> int:
        """SIGCONT, SIGTERM, wait up to the limit, then SIGKILL. Returns the exit code.

        SIGCONT first: a paused process keeps SIGTERM pending for ever.
        """
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self.wait(limit_seconds) is None:
            self.kill()
        return self.popen.returncode

    def wait(self, limit_seconds: float) -> int | None:
        """Wait for its end. Returns the exit code, or None if it still runs at the limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(limit_seconds)
        return None


def start_child(
    name: str,
    command: Sequence[str],
    *,
    output: Path | IO[bytes] | int | None = None,
    die_with_parent: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[bytes] | int | None = None,
) -> Child:
    """Start a child process without waiting for it.

    Args:
        name: For messages.
        command: Program and arguments; never a shell line.
        output: Where standard error goes, and standard output unless `stdout` is given; a path is appended to.
        die_with_parent: Whether the kernel kills it when the calling *thread* ends; so call from a thread that
            lives as long as the child should.
        cwd: Working folder.
        env: The whole environment; this process's own when None.
        stdout: Where standard output goes, if not to `output`.
    """
    opened = output.open("ab") if isinstance(output, Path) else None
    errors = opened or (output if not isinstance(output, Path) else None)
    try:
        popen = subprocess.Popen(
            launch_command(command, die_with_parent),
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else errors,
            stderr=errors,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
    finally:
        if opened:
            opened.close()
    return Child(name, popen)


class ChildProcess:
    """A child process of a service, on the loop: its end is reported, and stopping it has a limit."""

    def __init__(self, owner: Service, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self._owner = owner

    @classmethod
    async def start(
        cls,
        owner: Service,
        name: str,
        command: Sequence[str],
        on_exit: Callable[[int], None],
        **options: Any,
    ) -> ChildProcess:
        """Start `command` in its own process group, dying with this process.

        Args:
            owner: The service it belongs to.
            name: For messages and logs.
            command: Program and arguments; never a shell line.
            on_exit: Called once on the loop with the exit code (negative: the signal that ended it).
            options: Of `asyncio.create_subprocess_exec` (`pass_fds`, `env`, `stdout`, `cwd`, `limit`, ...).
        """
        options.setdefault("stdin", asyncio.subprocess.DEVNULL)
        process = await asyncio.create_subprocess_exec(
            *launch_command(command, die_with_parent=True), start_new_session=True, **options
        )
        child = cls(owner, name, process)
        owner.spawn(child._watch(on_exit), f"watch {name}")
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    def kill(self) -> None:
        """SIGKILL the whole group; returns at once."""
        self._signal(signal.SIGKILL)

    async def stop(self, deadline: Deadline) -> None:
        """SIGTERM, wait until the deadline, then SIGKILL, and wait for the end."""
        if self.running:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), deadline.remaining_seconds)
        if self.running:
            self.kill()
            await self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def _watch(self, on_exit: Callable[[int], None]) -> None:
        on_exit(await self.process.wait())
