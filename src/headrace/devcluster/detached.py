"""The dev cluster of `headrace dev`: lives in a folder, outlives the command that started it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from headrace.devcluster.cluster import Cluster, brokers_in
from headrace.devcluster.install import install_kafka
from headrace.devcluster.registry import Registry, install_registry
from headrace.devcluster.server import Server
from headrace.errors import EnvironmentProblem
from headrace.jvm import Progress
from headrace.jvm.cache import disk_problems, file_lock, write_atomically


class ServerStatus(NamedTuple):
    """How one server of the dev cluster is."""

    name: str
    running: bool
    pid: int
    port: int
    resident_bytes: int
    log: Path


class DevCluster:
    """Kafka and a schema registry in a folder, found again by every later command."""

    def __init__(self, home: Path, progress: Progress | None = None) -> None:
        """Look into a folder; nothing is written before `up`."""
        self._home = home.resolve()
        self._progress = progress

    @property
    def endpoints_file(self) -> Path:
        """File that says where everything is; exists while the cluster is up."""
        return self._home / "endpoints.json"

    def up(
        self,
        *,
        brokers: int | None = None,
        registry: bool = True,
        port: int | None = None,
        registry_port: int | None = None,
    ) -> dict[str, Any]:
        """Start what does not run, Kafka and the registry side by side, and wait until all answer.

        Args:
            brokers: 1 or 3; as many as the folder has, else 1, when None.
            registry: Whether the registry is wanted too; one that runs is left alone.
            port: Port of broker 1; one that is free when None, the same as last time where possible.
            registry_port: The same for the registry.

        Returns:
            What `endpoints.json` holds.

        Raises:
            EnvironmentProblem: Something is missing on this machine or in the way; nothing new is left running.
        """
        with disk_problems(self._home, "or use another --directory"), file_lock(self._home / "lock"):
            install_kafka(self._progress)
            if registry:
                install_registry(self._progress)
            cluster = Cluster(
                self._home / "kafka", brokers or brokers_in(self._home / "kafka"), port=port, detached=True
            )
            schemas = Registry(self._home / "registry", port=registry_port, detached=True)
            _keeps_its_port(cluster.servers[0], cluster.ports[:1], port)
            _keeps_its_port(schemas.server, [schemas.port], registry_port)
            was_running = schemas.server.running
            try:
                if registry:
                    schemas.launch()
                cluster.start()
                if registry:
                    schemas.wait_ready()
            except BaseException:
                if not was_running:
                    schemas.server.kill()
                raise
            return self._write_endpoints(cluster, schemas)

    def down(self) -> bool:
        """End everything properly; the data stays. Returns whether anything ran."""
        with file_lock(self._home / "lock"):
            self.endpoints_file.unlink(missing_ok=True)
            cluster, schemas = self._open()
            ran = any(server.running for server in [*cluster.servers, schemas.server])
            schemas.stop()
            cluster.stop()
            return ran

    def reset(self) -> None:
        """End everything and delete its data."""
        self.down()
        shutil.rmtree(self._home)

    def status(self) -> list[ServerStatus]:
        """Return every server this folder has, in start order; empty if it has none."""
        cluster, schemas = self._open()
        ports = [*cluster.ports, schemas.port]
        pairs = zip([*cluster.servers, schemas.server], ports, strict=False)
        return [_status(server, port) for server, port in pairs if server.id]

    def endpoints(self) -> dict[str, Any]:
        """Return what `endpoints.json` holds.

        Raises:
            EnvironmentProblem: The cluster is not up.
        """
        try:
            document: dict[str, Any] = json.loads(self.endpoints_file.read_text())
        except FileNotFoundError as cause:
            text = f"No dev cluster is up in {self._home}. Start one with: headrace dev up"
            raise EnvironmentProblem(text) from cause
        return document

    def _open(self) -> tuple[Cluster, Registry]:
        folder = self._home / "kafka"
        return Cluster(folder, brokers_in(folder), detached=True), Registry(self._home / "registry", detached=True)

    def _write_endpoints(self, cluster: Cluster, schemas: Registry) -> dict[str, Any]:
        document: dict[str, Any] = {
            "kafka": {"bootstrap_servers": cluster.bootstrap_servers, "brokers": cluster.endpoints}
        }
        if schemas.server.running:
            document["schema_registry"] = {"url": schemas.url}
        write_atomically(self.endpoints_file, json.dumps(document, indent=2) + "\n")
        return document


def environment(endpoints: dict[str, Any]) -> dict[str, str]:
    """Return the variables that a configuration refers to, from what `endpoints.json` holds."""
    variables = {"KAFKA": endpoints["kafka"]["bootstrap_servers"]}
    if "schema_registry" in endpoints:
        variables["SCHEMA_REGISTRY_URL"] = endpoints["schema_registry"]["url"]
    return variables


def _keeps_its_port(server: Server, ports: list[int], asked: int | None) -> None:
    if server.running and asked not in (None, *ports):
        raise EnvironmentProblem(
            f"{server.name} runs already, on port {ports[0]}, not {asked}. Go on with that,"
            " or stop it first: headrace dev down"
        )


def _status(server: Server, port: int) -> ServerStatus:
    running = server.running
    pid = server.id.pid if server.id and running else 0
    return ServerStatus(server.name, running, pid, port, _resident_bytes(pid) if running else 0, server.log)


def _resident_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
