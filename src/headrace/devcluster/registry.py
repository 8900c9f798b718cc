"""A schema registry as a local process: Apicurio Registry through its Confluent-compatible API."""

from __future__ import annotations

import json
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.devcluster.archive import SMALL_JVM, archive_flags, prepare_archive
from headrace.devcluster.ports import free_ports, is_free, require_free
from headrace.devcluster.server import Server, ServerId
from headrace.errors import EnvironmentProblem, PortTaken
from headrace.jvm import Java, Progress, ensure_artifacts, find_java
from headrace.jvm.cache import write_atomically

_API = "/apis/ccompat/v7"


@dataclass(frozen=True)
class RegistryInstall:
    """The registry on this machine."""

    java: Java
    folder: Path

    def command(self, port: int, data: Path, flags: list[str] | None = None) -> list[str]:
        """Return the command that runs it; `flags` take the place of those that use the archive."""
        (jar,) = self.folder.glob("*run*.jar")
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": port,
            "quarkus.http.access-log.enabled": "false",
            "quarkus.log.level": "WARN",
            "java.util.logging.manager": "org.jboss.logmanager.LogManager",
            "apicurio.ccompat.legacy-id-mode.enabled": "false",
            # On disk: Kafka's data survives `dev down`, and the schema ids in it must stay valid.
            "apicurio.datasource.url": f"jdbc:h2:file:{data / 'schemas'}",
        }
        return [
            *(str(self.java.executable), "-Xmx192m", "-XX:MaxMetaspaceSize=192m", *SMALL_JVM),
            *(archive_flags(self.folder, self.java) if flags is None else flags),
            *(f"-D{key}={value}" for key, value in settings.items()),
            *("-jar", str(jar)),
        ]


def install_registry(progress: Progress | None = None) -> RegistryInstall:
    """Return the registry, installing what is missing: the current one on Java 21 or newer, else its last for 17.

    The older one answers a few questions wrongly (a reformatted schema is not found, a bad compatibility level is
    answered with 500, `GET /mode` is missing).

    Raises:
        EnvironmentProblem: No fitting Java, or an artifact cannot be had.
    """
    java = find_java(17, prefer=21)
    name = "registry" if java.version >= 21 else "registry-java17"
    install = RegistryInstall(java, ensure_artifacts(name, progress))

    def exercise(flags: list[str], scratch: Path) -> None:
        (port,) = free_ports(1)
        server = Server("The registry that prepares quick starts", scratch / "registry.log")
        server.start(install.command(port, scratch, flags), detached=False, cwd=install.folder)
        try:
            server.wait_until(lambda: _answers(port), limit_seconds=90)
            _call(port, "/subjects/prepare/versions", "POST", {"schema": '"string"'})
        finally:
            server.stop(limit_seconds=60)

    prepare_archive(install.folder, java, exercise, progress)
    return install


class Registry:
    """A schema registry in a folder; as a context manager it is killed and deleted at the end."""

    def __init__(
        self, directory: Path, *, port: int | None = None, detached: bool = False, progress: Progress | None = None
    ) -> None:
        """Describe a registry; if the folder holds one already, this is that one.

        Args:
            directory: Folder for its data and log; made if missing.
            port: Its port; a free one is chosen when None.
            detached: Whether it outlives this process.
            progress: Told about a first installation.
        """
        self._directory = directory
        self._fixed_port = port
        self._port = 0
        self._detached = detached
        self._progress = progress
        self._state_file = directory / "registry.json"
        self.server = Server("The schema registry", directory / "registry.log")
        if self._state_file.exists():
            state = json.loads(self._state_file.read_text())
            self._port, self.server.id = state["port"], ServerId(*state["process"])

    @property
    def url(self) -> str:
        """Base URL of the Confluent-compatible API."""
        return f"http://127.0.0.1:{self._port}{_API}"

    @property
    def port(self) -> int:
        """Port it listens on; 0 before the first start."""
        return self._port

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

    def start(self) -> None:
        """Start it, if it does not run, and wait until it answers.

        Raises:
            EnvironmentProblem: Java or an artifact is missing, the port is taken, or it does not start.
        """
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it without waiting for its answers; does nothing if it runs."""
        if self.server.running:
            return
        install = install_registry(self._progress)
        self._choose_port()
        self._directory.mkdir(parents=True, exist_ok=True)
        command = install.command(self._port, self._directory.resolve())
        self.server.start(command, detached=self._detached, cwd=install.folder)
        write_atomically(self._state_file, json.dumps({"port": self._port, "process": self.server.id}))

    def wait_ready(self, limit_seconds: float = 60.0) -> None:
        """Wait until it answers, and set the global compatibility level to BACKWARD, as Confluent's registry has it.

        Raises:
            EnvironmentProblem: It ended, or the time is up.
        """
        for attempts_left in (2, 1, 0):
            try:
                self.server.wait_until(lambda: _answers(self._port), limit_seconds)
                break
            except PortTaken:
                if self._fixed_port or not attempts_left:
                    raise
                self.launch()
        try:
            _call(self._port, "/config", "PUT", {"compatibility": "BACKWARD"})
        except OSError as cause:
            raise EnvironmentProblem(f"The schema registry refused its compatibility level: {cause}") from cause

    def stop(self) -> None:
        """End it properly; its data stays."""
        self.server.stop()

    def remove(self) -> None:
        """Kill it and delete the folder."""
        self.server.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _choose_port(self) -> None:
        if self._fixed_port:
            require_free(self._fixed_port, "the schema registry", "--registry-port")
            self._port = self._fixed_port
        elif not self._port or not is_free(self._port):
            (self._port,) = free_ports(1)


def _answers(port: int) -> bool:
    return _call(port, "/subjects") == 200


def _call(port: int, path: str, method: str = "GET", body: object = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{_API}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)
