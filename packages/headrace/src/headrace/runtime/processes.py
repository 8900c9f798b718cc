"""Child processes: started by exec with an explicit command, in their own process group, dying with their parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from headrace.runtime.children import child_environment
from headrace.runtime.clock import Deadline
from headrace.runtime.service import Service

Child = subprocess.Popen[bytes]

_LAUNCH = str(Path(__file__).with_name("launch.py"))
_LAUNCH_GROUP = str(Path(__file__).with_name("launch_group.py"))


def launch_command(command: Sequence[str], die_with_parent: bool) -> list[str]:
    """Return the command that runs `command`, wrapped so that it dies with this process if `die_with_parent`."""
    if not die_with_parent:
        return list(command)
    return [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), *command]


def group_command(command: Sequence[str]) -> list[str]:
    """Return the command that runs a user's program; what it starts in its process group ends with this process."""
    return [sys.executable, "-I", "-S", _LAUNCH_GROUP, str(os.getpid()), *command]


def start_child(
    command: Sequence[str],
    *,
    output: Path | IO[bytes] | int | None = None,
    die_with_parent: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start a child process, in a process group of its own, for callers without a loop; does not wait for it.

    Args:
        command: Program and arguments; never a shell line.
        output: Where standard output and error go; a path is appended to.
        die_with_parent: Whether the kernel kills it when the calling *thread* ends; so call from a thread that
            lives as long as the child should.
        cwd: Working folder.
        env: The whole environment; `child_environment` when None.
    """
    with output.open("ab") if isinstance(output, Path) else contextlib.nullcontext(output) as written:
        return subprocess.Popen(
            launch_command(command, die_with_parent),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            cwd=cwd,
            env=child_environment() if env is None else env,
            start_new_session=True,
        )


def run_program(command: Sequence[str], limit_seconds: float, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a program and return its exit code and everything it printed; -9 past the limit.

    Without `env` it has `child_environment`.
    """
    with tempfile.TemporaryFile() as output:
        child = start_child(command, output=output, env=env)
        try:
            child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return child.returncode, output.read().decode(errors="replace")


class ChildProcess:
    """A child process of a service, on the loop: its end is reported, and stopping it has a limit."""

    def __init__(self, owner: Service, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self._owner = owner

    @classmethod
    async def start(
        cls, owner: Service, name: str, command: Sequence[str], on_exit: Callable[[int], object], **options: Any
    ) -> Self:
        """Start `command` in its own process group, dying with this process.

        Args:
            command: Program and arguments; never a shell line.
            on_exit: Called once on the loop with the exit code (negative: the signal that ended it).
            options: Of `asyncio.create_subprocess_exec` (`pass_fds`, `env`, `stdout`, `cwd`, `limit`, ...). Without
                `stdin` it reads nothing; without `env` it has `child_environment`.
        """
        options = {"stdin": asyncio.subprocess.DEVNULL, "env": child_environment(), **options}
        options["env"] = dict(options["env"])  # uvloop takes nothing else
        process = await asyncio.create_subprocess_exec(
            *launch_command(command, die_with_parent=True), start_new_session=True, **options
        )
        child = cls(owner, name, process)
        owner.spawn(child._watch(on_exit), f"watch {name}")
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
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

    async def _watch(self, on_exit: Callable[[int], object]) -> None:
        on_exit(await self.process.wait())
