"""One or three brokers of real Apache Kafka as local processes, each of which can be killed, paused, restarted."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.errors import EnvironmentProblem
from headrace_devkit.devcluster import broker_protocol
from headrace_devkit.devcluster.broker_files import NodePorts, format_data_folder, make_checkpoint, server_properties
from headrace_devkit.devcluster.certificates import SERVER_NAME, write_file
from headrace_devkit.devcluster.group import JavaGroup
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.program import JavaProgram
from headrace_devkit.devcluster.security import ClusterSecurity
from headrace_jvm import Progress, ensure_artifacts, find_java

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_SETTLE_SECONDS = 60.0
# Several requests of 100 MB at once. A broker without memory ends, because it would answer no client.
_HEAP = ("-Xmx1g", "-XX:+ExitOnOutOfMemoryError")


class Cluster(JavaGroup):
    """A Kafka cluster in a folder."""

    title = "Kafka"
    state_name = "cluster.json"
    port_option = "--port"
    ports_per_server = 2

    def __init__(
        self,
        directory: Path,
        brokers: int | None = None,
        *,
        port: int | None = None,
        detached: bool = False,
        proxied: bool = False,
        secured: bool | None = None,
    ) -> None:
        """Describe a cluster.

        Args:
            directory: Folder for its data, configuration and logs; made if missing.
            brokers: 1 or 3, with ids from 1 on; as many as the folder has, else 1, when None.
            port: Port of broker 1 (the others take the next ones); free ports are chosen when None.
            detached: Whether the brokers outlive this process.
            proxied: Whether every broker has one more listener, to be reached by way of `routes`.
            secured: Whether every broker also has listeners with TLS, logins and access rules; as the folder has them
                when None.

        Raises:
            EnvironmentProblem: The folder holds a cluster of another size, or one that is secured otherwise.
        """
        super().__init__(directory, port=port, detached=detached)
        self._state.setdefault("secured", bool(secured))
        if secured not in (None, self._state["secured"]):
            has = "is secured" if self._state["secured"] else "is not secured"
            raise EnvironmentProblem(
                f"The cluster in {self._directory} {has}. Continue without that option, or delete it and its data with:"
                " headrace dev reset"
            )
        self.security = ClusterSecurity(self._directory / "security") if self._state["secured"] else None
        """Users and certificates of a secured cluster."""
        more = ("sasl", "tls") if self.security else ("proxied", "proxy") if proxied else ()
        self._listeners = ("broker", "controller", *more)
        self.ports_per_server = len(self._listeners)
        known = len(self._state["nodes"])
        if brokers and known not in (0, brokers):
            raise EnvironmentProblem(
                f"The cluster in {self._directory} has {known} broker(s), not {brokers}."
                " Continue with that number, or delete it and its data with: headrace dev reset"
            )
        for n in range(1, (brokers or known or 1) + 1):
            self._add(n, Server(f"Broker {n}", self._directory / f"n{n}" / "broker.log"))

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of every broker, comma separated."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def routes(self) -> dict[int, int]:
        """Of a proxied cluster: the ports that its brokers announce, and where each really listens."""
        return {node.proxy: node.proxied for node in self._nodes.values()}

    @property
    def sasl_servers(self) -> str:
        """`host:port` of every broker's listener for logins, comma separated; of a secured cluster."""
        return ",".join(f"{SERVER_NAME}:{node.sasl}" for node in self._nodes.values())

    @property
    def tls_servers(self) -> str:
        """`host:port` of every broker's listener for client certificates, comma separated; of a secured cluster."""
        return ",".join(f"{SERVER_NAME}:{node.tls}" for node in self._nodes.values())

    @property
    def _nodes(self) -> dict[int, NodePorts]:
        return {n: NodePorts(**dict(zip(self._listeners, found, strict=True))) for n, found in self._ports.items()}

    @property
    def endpoints(self) -> list[dict[str, int]]:
        """`id`, `pid` and `port` of every running broker."""
        return [
            {"id": n, "pid": server.id.pid, "port": self._ports[n][0]}
            for n, server in self._servers.items()
            if server.id and server.running
        ]

    def _find_program(self, progress: Progress | None) -> JavaProgram:
        return JavaProgram(find_java(17), ensure_artifacts("kafka", progress))

    def _exercise(self) -> None:
        self.create_topic("prepare")

    def _command(self, n: int) -> list[str]:
        data, properties = self._directory / f"n{n}" / "data", self._directory / f"n{n}" / "server.properties"
        security, nodes = self.security, self._nodes
        secured = security.listeners(nodes[n].sasl, nodes[n].tls) if security else None
        write_file(properties, server_properties(n, nodes, data, secured).encode(), 0o600)
        classes = ("-cp", f"{self._program.folder}/*")
        checkpoint = self._program.folder / "bootstrap.checkpoint"
        if not checkpoint.exists():  # at the first use of this version on this machine, under the lock of its archive
            tool = self._program._replace(archive_flags=()).command(*classes, "kafka.tools.StorageTool")
            make_checkpoint(tool, properties, data / "bootstrap.checkpoint", checkpoint)
        format_data_folder(data, self._state["cluster_id"], n, checkpoint)
        logging = f"-Dlog4j2.configurationFile={_LOG_CONFIG}"
        flags = security.java_flags() if security else []
        return self._program.command(*_HEAP, logging, *flags, *classes, "kafka.Kafka", str(properties))

    def _wait_ready(self, limit_seconds: float) -> None:
        """Wait until every broker answers and sees all of them."""
        brokers = set(self._servers)
        for server, port in zip(self.servers, self.ports, strict=True):
            server.wait_until(functools.partial(_sees, port, brokers), limit_seconds)
        if self.security:
            self.security.grant(self.bootstrap_servers)

    def launch(self) -> None:
        if self.security:
            self.security.prepare()
        super().launch()

    def wait_in_sync(self, limit_seconds: float = 120.0) -> None:
        """Wait until every partition has a leader and all its replicas in sync.

        Raises:
            EnvironmentProblem: The time is up; names a partition that lags.
        """

        def behind(metadata: broker_protocol.Metadata) -> str:
            late = [p for p in metadata.partitions if p.leader < 0 or set(p.in_sync) != set(p.replicas)]
            return f"{late[0].topic}-{late[0].partition} has {late[0].in_sync} of {late[0].replicas}" if late else ""

        self._wait_for(behind, limit_seconds)

    def create_topic(self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        """Create a topic with a replica on every broker, and wait until each broker knows its leaders.

        Raises:
            EnvironmentProblem: Kafka refuses, or the leaders are not known in time.
        """
        end = time.monotonic() + _SETTLE_SECONDS
        while True:
            try:
                broker_protocol.create_topic(
                    self.endpoints[0]["port"], topic, partitions, len(self._servers), configs or {}
                )
                break
            except OSError as cause:
                # A broker that has just come back is not counted at once.
                if not isinstance(cause, TimeoutError | ConnectionError) or time.monotonic() > end:
                    raise EnvironmentProblem(f"Could not create topic {topic}: {cause}") from cause
                time.sleep(0.1)

        def missing(metadata: broker_protocol.Metadata) -> str:
            led = [p for p in metadata.partitions if p.topic == topic and p.leader >= 0]
            return "" if len(led) == partitions else f"{topic} has {len(led)} leaders of {partitions}"

        self._wait_for(missing, _SETTLE_SECONDS)

    def _wait_for(self, problem: Callable[[broker_protocol.Metadata], str], limit_seconds: float) -> None:
        end = time.monotonic() + limit_seconds
        for broker in self.endpoints:
            last = "no response"
            while last and time.monotonic() < end:
                with contextlib.suppress(OSError):
                    last = problem(broker_protocol.metadata(broker["port"]))
                time.sleep(0.02 if last else 0)
            if last:
                raise EnvironmentProblem(f"The cluster did not settle within {limit_seconds:.0f} s: {last}")


def _sees(port: int, brokers: set[int]) -> bool:
    return broker_protocol.metadata(port).brokers >= brokers
