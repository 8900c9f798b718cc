"""A schema registry as a local process: Apicurio Registry through its Confluent-compatible API."""

import json
import urllib.request
from pathlib import Path

from headrace.errors import EnvironmentProblem
from headrace_devkit.devcluster.group import JavaGroup
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.program import JavaProgram
from headrace_jvm import Progress, ensure_artifacts, find_java

_API = "/apis/ccompat/v7"


class Registry(JavaGroup):
    """A schema registry in a folder."""

    title = "the schema registry"
    state_name = "registry.json"
    port_option = "--registry-port"
    ports_per_server = 1

    def __init__(self, directory: Path, *, port: int | None = None, detached: bool = False) -> None:
        super().__init__(directory, port=port, detached=detached)
        self.server = self._add(1, Server("The schema registry", self._directory / "registry.log"))

    path = _API
    """Path of the Confluent-compatible API."""

    @property
    def url(self) -> str:
        """Base URL of the Confluent-compatible API; empty before the first start."""
        return f"http://127.0.0.1:{self.ports[0]}{_API}" if self.ports else ""

    def _find_program(self, progress: Progress | None) -> JavaProgram:
        try:
            java = find_java(21)
        except EnvironmentProblem as cause:
            raise EnvironmentProblem(
                f"The schema registry: {cause}; or leave it out: headrace dev up --no-registry"
            ) from cause
        return JavaProgram(java, ensure_artifacts("registry", progress))

    def _exercise(self) -> None:
        _call(self.ports[0], "/subjects/prepare/versions", "POST", {"schema": '"string"'})

    def _command(self, n: int) -> list[str]:
        (jar,) = self._program.folder.glob("*run*.jar")
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": self.ports[0],
            # Else 9000 on every address, which only one registry of this machine could have.
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": 0,
            "quarkus.http.access-log.enabled": "false",
            "quarkus.log.level": "WARN",
            "java.util.logging.manager": "org.jboss.logmanager.LogManager",
            "apicurio.ccompat.legacy-id-mode.enabled": "false",
            # On disk: Kafka's data survives `dev down`, and the schema ids in it must stay valid.
            "apicurio.datasource.url": f"jdbc:h2:file:{self._directory / 'schemas'}",
        }
        properties = [f"-D{key}={value}" for key, value in settings.items()]
        return self._program.command("-Xmx192m", "-XX:MaxMetaspaceSize=192m", *properties, "-jar", str(jar))

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
    with urllib.request.urlopen(request, timeout=10) as response:
        return int(response.status)
