"""The files a broker starts from: server.properties, meta.properties and the bootstrap checkpoint."""

import base64
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.errors import EnvironmentProblem
from headrace.runtime import run_program


class NodePorts(NamedTuple):
    """Where one node listens."""

    broker: int
    controller: int
    proxied: int = 0
    """Another listener for clients, 0 for none; what it announces is `proxy`, where something passes them on."""
    proxy: int = 0
    sasl: int = 0
    """Listener with TLS and logins, 0 for none."""
    tls: int = 0
    """Listener with TLS and client certificates, 0 for none."""


_SHARED = Path(__file__).with_name("broker.properties")


def new_id() -> str:
    """Return a random id as Kafka writes them: 16 bytes, URL-safe base64, no padding, no leading dash."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()).startswith("-"):
        pass
    return text


def server_properties(
    node: int, ports: dict[int, NodePorts], data: Path, secured: Mapping[str, str] | None = None
) -> str:
    """Return server.properties of one node.

    Args:
        node: Its id.
        ports: Every node of the cluster, which is its quorum too.
        data: Folder of its logs.
        secured: Settings of secured listeners; those with addresses are added to the others.
    """
    secured = dict(secured or {})
    replicas, in_sync = len(ports), max(1, len(ports) - 1)
    own = ports[node]
    voters = ",".join(f"{number}@127.0.0.1:{at.controller}" for number, at in ports.items())
    listened, announced = (f",PROXIED://127.0.0.1:{port}" if port else "" for port in (own.proxied, own.proxy))
    if secured:
        listened, announced = (f",{secured.pop(name)}" for name in ("listeners", "advertised.listeners"))
    specific = {
        "node.id": node,
        "controller.quorum.voters": voters,
        "listeners": f"PLAINTEXT://127.0.0.1:{own.broker},CONTROLLER://127.0.0.1:{own.controller}{listened}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{own.broker}{announced}",
        **secured,
        "log.dirs": data,
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }
    lines = "".join(f"{key}={value}\n" for key, value in specific.items())
    return _SHARED.read_text() + lines


def format_data_folder(data: Path, cluster_id: str, node: int, checkpoint: Path) -> None:
    """Make a data folder as `StorageTool format` would, without starting a JVM; a formatted one stays as it is.

    The checkpoint carries the feature levels of this Kafka version. Without it the broker starts at old levels, and
    the consumer group protocol of KIP-848 is refused.
    """
    if (data / "meta.properties").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(checkpoint, data / "bootstrap.checkpoint")
    text = f"version=1\ncluster.id={cluster_id}\nnode.id={node}\ndirectory.id={new_id()}\n"
    (data / "meta.properties").write_text(text)


def make_checkpoint(tool: list[str], properties: Path, made: Path, checkpoint: Path) -> None:
    """Let Kafka's own storage tool format a data folder, and keep the checkpoint that it makes there.

    Raises:
        EnvironmentProblem: The tool failed.
    """
    code, output = run_program([*tool, "format", "-t", new_id(), "-c", str(properties)], limit_seconds=60)
    if code != 0:
        raise EnvironmentProblem(f"Kafka's storage tool failed with exit code {code}:\n{output[-1000:]}")
    draft = checkpoint.with_suffix(".draft")
    shutil.copyfile(made, draft)
    draft.replace(checkpoint)
    shutil.rmtree(made.parent)
