"""A schema registry as a local process: Apicurio Registry through its Confluent-compatible API."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import NamedTuple

from headrace.devcluster.archive import SMALL_JVM, archive_flags, prepare_archive
from headrace.devcluster.group import ServerGroup
from headrace.devcluster.ports import free_ports
from headrace.devcluster.server import Server
from headrace.errors import EnvironmentProblem
from headrace.jvm import Java, Progress, ensure_artifacts, find_java

_API = "/apis/ccompat/v7"


class RegistryInstall(NamedTuple):
    """The registry on this machine."""

    java: Java
    folder: Path

    def command(self, port: int, data: Path, flags: list[str] | None = None) -> list[str]:
        """Return the command that runs it; `flags` take the place of those that use the archive."""
        (jar,) = self.folder.glob("*run*.jar")
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": port,
            # Else 9000 on every address, which only one registry of this machine could have.
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": 0,
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
    """Return the registry, installing what is missing.

    Raises:
        EnvironmentProblem: No Java of 21 or newer, or an artifact cannot be had.
    """
    try:
        java = find_java(21)
    except EnvironmentProblem as cause:
        raise EnvironmentProblem(
            f"The schema registry: {cause}; or leave it out: headrace dev up --no-registry"
        ) from cause
    install = RegistryInstall(java, ensure_artifacts("registry", progress))

    def exercise(flags: list[str], scratch: Path) -> None:
        (port,) = free_ports(1)
        server = Server("The registry that prepares quick starts", scratch / "registry.log")
        server.start(install.command(port, scratch, flags), detached=False, cwd=scratch)
        try:
            server.wait_until(lambda: _answers(port), limit_seconds=90)
            _call(port, "/subjects/prepare/versions", "POST", {"schema": '"string"'})
        finally:
            server.stop(limit_seconds=60)

    prepare_archive(install.folder, install.java, exercise, progress)
    return install


class Registry(ServerGroup):
    """A schema registry in a folder."""

    title = "the schema registry"
    port_option = "--registry-port"
    ports_per_server = 1

    def __init__(self, directory: Path, *, port: int | None = None, detached: bool = False) -> None:
        """Describe a registry; if the folder holds one already, this is that one. Arguments as of `Cluster`."""
        super().__init__(directory / "registry.json", port, detached)
        self.server = self._add(1, Server("The schema registry", self._directory / "registry.log"))

    @property
    def url(self) -> str:
        """Base URL of the Confluent-compatible API; empty before the first start."""
        return f"http://127.0.0.1:{self.ports[0]}{_API}" if self.ports else ""

    def install(self, progress: Progress | None = None) -> None:
        self._install = install_registry(progress)

    def _command(self, n: int) -> list[str]:
        return self._install.command(self.ports[0], self._directory)

    def _wait_ready(self, limit_seconds: float) -> None:
        """Wait until it answers, and set the global compatibility level to BACKWARD, as Confluent's registry has it."""
        self.server.wait_until(lambda: _answers(self.ports[0]), limit_seconds)
        try:
            _call(self.ports[0], "/config", "PUT", {"compatibility": "BACKWARD"})
        except OSError as cause:
            raise EnvironmentProblem(f"The schema registry refused its compatibility level: {cause}") from cause


def _answers(port: int) -> bool:
    return _call(port, "/subjects") == 200


def _call(port: int, path: str, method: str = "GET", body: object = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{_API}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)
