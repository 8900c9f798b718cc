import re
from pathlib import Path

from headrace_devkit.devcluster.broker_files import NodePorts, server_properties

THREE = {1: NodePorts(101, 201), 2: NodePorts(102, 202), 3: NodePorts(103, 203)}


def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    """Every address in the file is 127.0.0.1."""
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+", server_properties(1, THREE, tmp_path))) == {"127.0.0.1"}
