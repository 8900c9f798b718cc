from __future__ import annotations

import re
from pathlib import Path

from headrace_devkit.devcluster.broker_files import NodePorts, server_properties

THREE = {1: NodePorts(101, 201), 2: NodePorts(102, 202), 3: NodePorts(103, 203)}


def _parse(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = dict(line.split("=", 1) for line in lines)
    assert len(found) == len(lines), "a key is set twice"
    return found


def test_three_brokers_replicate_to_all_and_need_two(tmp_path: Path) -> None:
    """Replication factor 3 with two in sync, also for Kafka's own topics; all are voters."""
    found = _parse(server_properties(2, THREE, tmp_path))
    assert found["node.id"] == "2"
    assert found["advertised.listeners"] == "PLAINTEXT://127.0.0.1:102"
    assert found["controller.quorum.voters"] == "1@127.0.0.1:201,2@127.0.0.1:202,3@127.0.0.1:203"
    for topic in ("default", "offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        assert found[f"{topic}.replication.factor"] == "3"
    assert found["min.insync.replicas"] == found["transaction.state.log.min.isr"] == "2"


def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    """Every address in the file is 127.0.0.1."""
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+", server_properties(1, THREE, tmp_path))) == {"127.0.0.1"}
