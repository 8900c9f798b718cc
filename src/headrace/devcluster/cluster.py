"""One or three brokers of real Apache Kafka as local processes, each of which can be killed, paused, restarted."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.devcluster import wire
from headrace.devcluster.install import KafkaInstall, install_kafka
from headrace.devcluster.ports import free_ports, is_free, require_free
from headrace.devcluster.properties import NodePorts, format_data_folder, new_id, server_properties
from headrace.devcluster.server import Server, ServerId
from headrace.errors import EnvironmentProblem, PortTaken
from headrace.jvm import Progress
from headrace.jvm.cache import disk_problems, write_atomically

_READY_SECONDS = 60.0
_STATE = "cluster.json"


class Cluster:
    """A Kafka cluster in a folder.

    As a context manager it starts, and at the end kills its brokers and deletes the folder. Its brokers die with
    the thread that starts them; so start it from one that lives as long as the cluster should (the main one).
    """

    def __init__(
        self,
        directory: Path,
        brokers: int = 1,
        *,
        port: int | None = None,
        detached: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Describe a cluster; if the folder holds one already, this is that cluster.

        Args:
            directory: Folder for its data, configuration and logs; made if missing.
            brokers: 1 or 3. Broker ids are 1, 2, 3.
            port: Port of broker 1 (the others take the next ones); free ports are chosen when None.
            detached: Whether the brokers outlive this process.
            progress: Told about a first installation.

        Raises:
            EnvironmentProblem: The folder holds a cluster of another size.
        """
        self._directory = directory
        self._fixed_port = port
        self._detached = detached
        self._progress = progress
        self._ports: dict[int, NodePorts] = {}
        self._servers = {n: Server(f"Broker {n}", directory / f"n{n}" / "broker.log") for n in range(1, brokers + 1)}
        self._cluster_id = new_id()
        self._state_file = directory / _STATE
        self._install: KafkaInstall | None = None
        if self._state_file.exists():
            self._load(brokers)

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of every broker, comma separated."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def endpoints(self) -> list[dict[str, int]]:
        """`id`, `pid` and `port` of every running broker."""
        return [
            {"id": n, "pid": server.id.pid, "port": self._ports[n].broker}
            for n, server in self._servers.items()
            if server.id and server.running
        ]

    @property
    def servers(self) -> list[Server]:
        """The brokers' processes, in order of their ids."""
        return list(self._servers.values())

    @property
    def ports(self) -> list[int]:
        """The brokers' ports, in order of their ids; empty before the first start."""
        return [ports.broker for ports in self._ports.values()]

    @property
    def running(self) -> bool:
        """Whether every broker's process lives."""
        return all(server.running for server in self._servers.values())

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
        """Start every broker that does not run and wait until each sees all of them.

        Raises:
            EnvironmentProblem: Java or an artifact is missing, a port is taken, or a broker does not start.
        """
        self._install = install_kafka(self._progress)
        before = [server for server in self._servers.values() if server.running]
        try:
            with disk_problems(self._directory, "or use another folder"):
                self._start_missing()
        except BaseException:
            for server in self._servers.values():
                if server not in before:
                    server.kill()
            raise

    def stop(self) -> None:
        """End every broker properly, all at the same time; the data stays."""
        self._each_server(Server.ask_to_stop)
        self._each_server(Server.stop)

    def remove(self) -> None:
        """Kill every broker and delete the folder."""
        self._each_server(Server.kill)
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self, n: int) -> None:
        """End broker `n` with SIGKILL, as a crash would."""
        self._servers[n].kill()

    def pause(self, n: int) -> None:
        """Stop broker `n` in its tracks: its connections stay open and nothing answers (SIGSTOP)."""
        self._servers[n].signal(signal.SIGSTOP)

    def resume(self, n: int) -> None:
        """Let a paused broker go on."""
        self._servers[n].signal(signal.SIGCONT)

    def restart(self, n: int) -> None:
        """Start broker `n` again, after ending it properly if it runs; waits until every broker sees all.

        Raises:
            EnvironmentProblem: It does not start.
        """
        self._servers[n].stop()
        self._install = self._install or install_kafka(self._progress)
        self._start_broker(n)
        self.wait_ready()

    def wait_ready(self, limit_seconds: float = _READY_SECONDS) -> None:
        """Wait until every broker answers and sees all of them.

        Raises:
            EnvironmentProblem: A broker ended, or the time is up.
        """
        everybody = set(self._servers)
        for n, server in self._servers.items():
            server.wait_until(functools.partial(_sees, self._ports[n].broker, everybody), limit_seconds)

    def wait_in_sync(self, limit_seconds: float = 30.0) -> None:
        """Wait until every partition has a leader and all its replicas in sync.

        Raises:
            EnvironmentProblem: The time is up; names a partition that lags.
        """

        def behind(metadata: wire.Metadata) -> str:
            late = [p for p in metadata.partitions if p.leader < 0 or set(p.in_sync) != set(p.replicas)]
            return f"{late[0].topic}-{late[0].partition} has {late[0].in_sync} of {late[0].replicas}" if late else ""

        self._wait_for(behind, limit_seconds)

    def create_topic(self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        """Create a topic with a replica on every broker, and wait until each broker knows its leaders.

        Raises:
            EnvironmentProblem: Kafka refuses, or the leaders are not known in time.
        """
        port = self._ports[self.endpoints[0]["id"]].broker
        try:
            wire.create_topic(port, topic, partitions, len(self._servers), configs or {})
        except OSError as cause:
            raise EnvironmentProblem(f"Could not create topic {topic}: {cause}") from cause

        def missing(metadata: wire.Metadata) -> str:
            led = [p for p in metadata.partitions if p.topic == topic and p.leader >= 0]
            return "" if len(led) == partitions else f"{topic} has {len(led)} leaders of {partitions}"

        self._wait_for(missing, 30.0)

    def _wait_for(self, problem: Callable[[wire.Metadata], str], limit_seconds: float) -> None:
        end = time.monotonic() + limit_seconds
        for ports in [self._ports[broker["id"]] for broker in self.endpoints]:
            last = "no answer"
            while last and time.monotonic() < end:
                with contextlib.suppress(OSError):
                    last = problem(wire.metadata(ports.broker))
                time.sleep(0.02 if last else 0)
            if last:
                raise EnvironmentProblem(f"The cluster did not settle within {limit_seconds:.0f} s: {last}")

    def _start_missing(self) -> None:
        for attempts_left in (2, 1, 0):
            self._choose_ports()
            for n, server in self._servers.items():
                if not server.running:
                    self._start_broker(n)
            try:
                self.wait_ready()
                return
            except PortTaken:
                # Somebody was faster with a free port than the broker was.
                if self._fixed_port or not attempts_left:
                    raise
                self._each_server(Server.kill)

    def _each_server(self, call: Callable[[Server], None]) -> None:
        for server in self._servers.values():
            call(server)

    def _choose_ports(self) -> None:
        if any(server.running for server in self._servers.values()):
            return  # the ones that run hold the others' ports in their configuration
        fixed: list[int] = []
        if self._fixed_port:
            fixed = [self._fixed_port + offset for offset in range(len(self._servers))]
            for port in fixed:
                require_free(port, "Kafka", "--port")
        elif self._ports and all(is_free(port) for ports in self._ports.values() for port in ports):
            return
        chosen = free_ports(2 * len(self._servers), excluded=fixed)
        self._ports = {
            n: NodePorts(broker, chosen.pop())
            for n, broker in zip(self._servers, fixed or chosen[: len(self._servers)], strict=True)
        }

    def _start_broker(self, n: int) -> None:
        assert self._install
        folder = self._directory / f"n{n}"
        format_data_folder(folder / "data", self._cluster_id, n, self._install.checkpoint)
        (folder / "server.properties").write_text(server_properties(n, self._ports, folder / "data"))
        self._servers[n].start(self._install.command(folder / "server.properties"), detached=self._detached)
        self._save()

    def _save(self) -> None:
        nodes = {n: {"ports": self._ports[n], "process": server.id} for n, server in self._servers.items()}
        write_atomically(self._state_file, json.dumps({"cluster_id": self._cluster_id, "nodes": nodes}))

    def _load(self, brokers: int) -> None:
        state = json.loads(self._state_file.read_text())
        if len(state["nodes"]) != brokers:
            raise EnvironmentProblem(
                f"The cluster in {self._directory} has {len(state['nodes'])} broker(s), not {brokers}."
                " Go on with that number, or delete it and its data with: headrace dev reset"
            )
        self._cluster_id = state["cluster_id"]
        for number, node in state["nodes"].items():
            self._ports[int(number)] = NodePorts(*node["ports"])
            self._servers[int(number)].id = ServerId(*node["process"]) if node["process"] else None


def _sees(port: int, brokers: set[int]) -> bool:
    return wire.metadata(port).brokers >= brokers


def brokers_in(directory: Path) -> int:
    """Return how many brokers the cluster in a folder has; 1 if there is none yet."""
    state = directory / _STATE
    return len(json.loads(state.read_text())["nodes"]) if state.exists() else 1
