"""Servers that belong together, in a folder: started, found again by later commands, ended."""

import json
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from headrace.errors import EnvironmentProblem, PortTaken
from headrace.runtime.cache import write_atomically
from headrace_devkit.devcluster.broker_files import new_id
from headrace_devkit.devcluster.jvm_server import Server, ServerId, StillStarting
from headrace_devkit.devcluster.ports import free_ports, is_free, require_free
from headrace_devkit.devcluster.program import JavaProgram
from headrace_jvm import Progress
from headrace_jvm.disk import disk_problems


class ServerGroup(ABC):
    """Servers with numbers from 1 on.

    As a context manager it starts them, and at the end kills them and deletes the folder. They die with the thread
    that starts them unless detached; so start them from one that lives as long as they should (the main one).
    """

    title: ClassVar[str]
    state_name: ClassVar[str]
    port_option: ClassVar[str]
    ports_per_server: int

    def __init__(self, directory: Path, *, port: int | None = None, detached: bool = False) -> None:
        """Describe a group; if the folder holds one already, this is that group.

        Args:
            directory: Folder for its data, configuration and logs; made if missing.
            port: Port of server 1 (the others take the next ones); free ports are chosen when None.
            detached: Whether the servers outlive this process.
        """
        self._directory = directory.resolve()
        self._state_file = self._directory / self.state_name
        self._fixed_port = port
        self._detached = detached
        self._servers: dict[int, Server] = {}
        self._ports: dict[int, list[int]] = {}
        self._state: dict[str, Any] = {"cluster_id": new_id(), "nodes": {}}
        if self._state_file.exists():
            self._state = json.loads(self._state_file.read_text())

    @property
    def servers(self) -> list[Server]:
        """The processes, in order of their numbers."""
        return list(self._servers.values())

    @property
    def ports(self) -> list[int]:
        """The port of each server, in order of their numbers; empty before the first start."""
        return [ports[0] for ports in self._ports.values()]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def start(self, progress: Progress | None = None) -> None:
        """Start every server that does not run and wait until all are ready; `progress` gets that of an installation.

        Raises:
            EnvironmentProblem: Java or an artifact is missing, a port is taken, or a server does not start.
        """
        start_together(self, progress=progress)

    def stop(self, limit_seconds: float = 10.0) -> None:
        """End every server properly, all at the same time, by force after the limit; the data stays."""
        for server in self.servers:
            server.ask_to_stop()
        for server in self.servers:
            server.stop(limit_seconds)

    def remove(self) -> None:
        """Kill every server and delete the folder."""
        for server in self.servers:
            server.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self, n: int) -> None:
        """End server `n` with SIGKILL, as a crash would."""
        self._servers[n].kill()

    def pause(self, n: int) -> None:
        """Stop server `n` in its tracks: its connections stay open and nothing answers (SIGSTOP)."""
        self._servers[n].signal(signal.SIGSTOP)

    def resume(self, n: int) -> None:
        """Continue a paused server."""
        self._servers[n].signal(signal.SIGCONT)

    def restart(self, n: int) -> None:
        """Start server `n` again, after ending it properly if it runs; waits until all are ready.

        Raises:
            EnvironmentProblem: It does not start.
        """
        self.install()
        self._servers[n].stop()
        self._run(n)
        self.wait_ready()

    def launch(self) -> None:
        """Start every server that does not run, without waiting until it answers.

        Raises:
            EnvironmentProblem: See `start`.
        """
        with disk_problems(self._directory, "or work in another folder"):
            for server in self.servers:
                if not server.running:
                    server.wait_for_end()  # one that was just killed holds its ports for a moment
            self._choose_ports()
            for n, server in self._servers.items():
                if not server.running:
                    self._run(n)

    def wait_ready(self, limit_seconds: float = 120.0) -> None:
        """Wait until every server is ready for work.

        Raises:
            EnvironmentProblem: One ended, or the time is up.
        """
        for attempts_left in (2, 1, 0):
            try:
                self._wait_ready(limit_seconds)
                return
            except PortTaken:
                # Another program took the free port before the server did.
                if self._fixed_port or not attempts_left:
                    raise
                for server in self.servers:
                    server.kill()
                self._ports = {}
                self.launch()

    @abstractmethod
    def install(self, progress: Progress | None = None) -> None:
        """Install the missing files on this machine.

        Raises:
            EnvironmentProblem: No fitting Java, or an artifact cannot be had.
        """

    @abstractmethod
    def _command(self, n: int) -> list[str]: ...

    @abstractmethod
    def _wait_ready(self, limit_seconds: float) -> None: ...

    def _add(self, n: int, server: Server) -> Server:
        self._servers[n] = server
        if node := self._state["nodes"].get(str(n)):
            self._ports[n] = node["ports"]
            server.id = ServerId(*node["process"]) if node["process"] else None
        return server

    def _choose_ports(self) -> None:
        if running := [server for server in self.servers if server.running]:
            # The others' ports are in the configuration of those that run.
            if self._fixed_port not in (None, self.ports[0]):
                raise EnvironmentProblem(
                    f"{running[0].name} runs already, on port {self.ports[0]}, not {self._fixed_port}. Use that,"
                    " or stop it first: headrace dev down"
                )
            return
        count = len(self._servers)
        fixed = [self._fixed_port + offset for offset in range(count)] if self._fixed_port else []
        for port in fixed:
            require_free(port, self.title, self.port_option)
        if not fixed and self._ports and all(is_free(port) for ports in self._ports.values() for port in ports):
            return
        chosen = [*fixed, *free_ports(count * self.ports_per_server - len(fixed), excluded=fixed)]
        self._ports = {n: chosen[index::count] for index, n in enumerate(self._servers)}

    def _run(self, n: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._servers[n].start(self._command(n), detached=self._detached, cwd=self._directory)
        nodes = {n: {"ports": self._ports[n], "process": server.id} for n, server in self._servers.items()}
        write_atomically(self._state_file, json.dumps({**self._state, "nodes": nodes}))


class JavaGroup(ServerGroup):
    """Servers that are one Java program."""

    def install(self, progress: Progress | None = None) -> None:
        self._program = self._find_program(progress)
        self._program.archive.make(self._try_out, progress)

    def _try_out(self, flags: Sequence[str], scratch: Path) -> None:
        """Run another group of this kind in a scratch folder, for the archive of its classes."""
        trial = type(self)(scratch)
        trial._program = self._program._replace(archive_flags=flags)
        try:
            trial.launch()
            trial.wait_ready()
            trial._exercise()
        finally:
            trial.stop(limit_seconds=60)

    @abstractmethod
    def _find_program(self, progress: Progress | None) -> JavaProgram: ...

    @abstractmethod
    def _exercise(self) -> None:
        """Run the frequent operations once, so that their classes are in the archive."""


def start_together(
    *groups: ServerGroup, progress: Progress | None = None, may_be_late: ServerGroup | None = None
) -> str:
    """Start what does not run of several groups, side by side, and wait until all are ready.

    Returns why `may_be_late` is not ready in time, if it still starts then; else an empty text.

    Raises:
        EnvironmentProblem: Something is missing on this machine or in the way; nothing new is left running.
    """
    late = ""
    for group in groups:
        group.install(progress)
    before = [server for group in groups for server in group.servers if server.running]
    try:
        for group in groups:
            group.launch()
        for group in groups:
            try:
                group.wait_ready()
            except StillStarting as cause:
                if group is not may_be_late:
                    raise
                late = cause.description
    except BaseException:
        for group in groups:
            for server in group.servers:
                if server not in before:
                    server.kill()
        raise
    return late
