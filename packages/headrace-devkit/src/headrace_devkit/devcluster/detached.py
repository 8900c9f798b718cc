"""The dev cluster of `headrace dev`: lives in a folder, outlives the command that started it."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.dev_endpoints import HOME
from headrace.runtime.cache import write_atomically
from headrace_devkit.devcluster.cluster import Cluster
from headrace_devkit.devcluster.group import ServerGroup, start_together
from headrace_devkit.devcluster.registry_server import Registry
from headrace_devkit.devcluster.security import ClusterSecurity
from headrace_devkit.devcluster.token_server import TokenServer
from headrace_jvm import Progress
from headrace_jvm.disk import disk_problems, file_lock


class ServerStatus(NamedTuple):
    """How one server of the dev cluster is."""

    server: str
    running: bool
    port: int
    pid: int | None
    log: Path


class DevCluster:
    """Kafka and a schema registry in a folder, found again by every later command."""

    def __init__(self, home: Path = HOME) -> None:
        """Look into a folder; nothing is written before `up`."""
        self._home = home.resolve()
        self.late = ""
        """After `up`: why the registry is not ready yet; empty if it is."""

    @property
    def endpoints_file(self) -> Path:
        """File with the addresses of all servers; exists while the cluster is up."""
        return self._home / "endpoints.json"

    def up(
        self,
        *,
        brokers: int | None = None,
        registry: bool | None = None,
        port: int | None = None,
        registry_port: int | None = None,
        secured: bool | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Start the servers that do not run, in parallel, and wait until all respond.

        A registry that is late is left to its start: `late` reports it, and the next `up` waits for it again.

        Args:
            brokers: 1 or 3; as many as the folder has, else 1, when None.
            registry: Whether to start the registry too; one that runs is not stopped. When None, it is started where
                the folder has one, and in a new folder.
            port: Port of broker 1; one that is free when None, the same as last time where possible.
            registry_port: The same for the registry.
            secured: Whether the brokers also have listeners with TLS, logins and access rules; as before when None.
            progress: Gets the progress of a first installation.

        Returns:
            What `endpoints.json` holds.

        Raises:
            EnvironmentProblem: Something is missing on this machine, or a port is taken; nothing new is left running.
        """
        with self._locked():
            cluster = Cluster(self._home / "kafka", brokers, port=port, detached=True, secured=secured)
            schemas = Registry(self._home / "registry", port=registry_port, detached=True)
            if registry is None:
                registry = bool(schemas.ports) or not cluster.ports
            groups = [schemas, cluster] if registry else [cluster]
            self.late = start_together(*groups, progress=progress, may_be_late=schemas)
            document: dict[str, Any] = {
                "kafka": {"bootstrap_servers": cluster.bootstrap_servers, "brokers": cluster.endpoints}
            }
            if schemas.server.running:
                document["schema_registry"] = {"url": schemas.url}
            if cluster.security:
                document["secured"] = self._secured(cluster, schemas, cluster.security)
            write_atomically(self.endpoints_file, json.dumps(document, indent=2) + "\n")
            return document

    def down(self) -> bool:
        """End everything properly; the data stays. Returns whether anything ran."""
        with self._locked():
            self.endpoints_file.unlink(missing_ok=True)
            ran = any(server.running for server in self.status())
            for group in self._groups():
                group.stop()
            return ran

    def reset(self) -> None:
        """End everything and delete its data."""
        self.down()
        shutil.rmtree(self._home)

    def status(self) -> list[ServerStatus]:
        """Return every server this folder has; empty if it has none."""
        return [
            ServerStatus(server.name, server.running, port, server.id.pid if server.running else None, server.log)
            for group in self._groups()
            for server, port in zip(group.servers, group.ports, strict=False)
            if server.id
        ]

    def _secured(self, cluster: Cluster, schemas: Registry, security: ClusterSecurity) -> dict[str, Any]:
        port = schemas.ports[0] if schemas.server.running else 0
        tokens = TokenServer(self._home / "tokens", security, registry_port=port, detached=True)
        if not tokens.server.running:
            tokens.start()
        document = security.document(cluster.sasl_servers, cluster.tls_servers)
        document["token_url"] = tokens.token_url
        return {**document, "schema_registry": {"url": tokens.registry_url + schemas.path}} if port else document

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with disk_problems(self._home, "or work in another folder"), file_lock(self._home / "lock"):
            yield

    def _groups(self) -> list[ServerGroup]:
        cluster = Cluster(self._home / "kafka", detached=True)
        groups: list[ServerGroup] = [cluster, Registry(self._home / "registry", detached=True)]
        if cluster.security:
            groups.append(TokenServer(self._home / "tokens", cluster.security, detached=True))
        return groups
