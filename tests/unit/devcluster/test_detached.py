from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.config.dev_endpoints import HOME, environment
from headrace.errors import EnvironmentProblem
from headrace_devkit.dev_command import dev
from headrace_devkit.devcluster import Cluster, DevCluster, Registry
from headrace_devkit.devcluster.group import ServerGroup
from yaml_table import table

UP = {
    "kafka": {"bootstrap_servers": "127.0.0.1:1", "brokers": [{"id": 1, "pid": 2, "port": 1}]},
    "schema_registry": {"url": "http://127.0.0.1:2/x"},
}


def _remember(home: Path, brokers: int) -> None:
    nodes = {n: {"ports": [n, n + 10], "process": [2**22 + n, "1"]} for n in range(1, brokers + 1)}
    (home / "kafka").mkdir(parents=True)
    (home / "kafka" / "cluster.json").write_text(json.dumps({"cluster_id": "c", "nodes": nodes}))


def test_a_cluster_of_another_size_is_refused(tmp_path: Path) -> None:
    """The error has both numbers and the command that starts from nothing."""
    _remember(tmp_path, 1)
    with pytest.raises(EnvironmentProblem, match=r"has 1 broker\(s\), not 3\..* headrace dev reset"):
        Cluster(tmp_path / "kafka", 3)


@pytest.mark.parametrize(("kafka", "registry", "option", "starts_registry"), table(__file__, "whether_there"))
def test_whether_there_is_a_registry_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kafka: int, registry: int, option: list[str], starts_registry: bool
) -> None:
    """Without the option, `up` starts a registry in a new folder, and where the folder has one."""
    started: list[ServerGroup] = []
    monkeypatch.setattr(
        "headrace_devkit.devcluster.detached.start_together", lambda *groups, **_: started.extend(groups)
    )
    monkeypatch.chdir(tmp_path)
    if kafka:
        _remember(tmp_path / HOME, kafka)
    if registry:
        (tmp_path / HOME / "registry").mkdir()
        node = {"ports": [9], "process": [2**22 + 9, "1"]}
        (tmp_path / HOME / "registry/registry.json").write_text(json.dumps({"cluster_id": "c", "nodes": {1: node}}))
    CliRunner().invoke(dev, ["up", *option], standalone_mode=False, catch_exceptions=False)
    assert any(isinstance(group, Registry) for group in started) == starts_registry


def test_down_forgets_the_endpoints_of_dead_servers(tmp_path: Path) -> None:
    """A machine that was switched off leaves a file that no longer holds."""
    _remember(tmp_path, 1)
    (tmp_path / "endpoints.json").write_text(json.dumps(UP))
    cluster = DevCluster(tmp_path)
    assert [server.running for server in cluster.status()] == [False]
    assert cluster.down() is False
    assert not cluster.endpoints_file.exists()


def test_the_environment_names_what_runs() -> None:
    """Without a registry there is no line for it."""
    addresses = {name: {"bootstrap_servers": f"localhost:{port}"} for name, port in (("sasl_ssl", 3), ("ssl", 4))}
    urls = {"token_url": "https://localhost:5/token", "schema_registry": {"url": "https://localhost:5/x"}}
    assert environment({"kafka": UP["kafka"], "secured": {**addresses, **urls}}) == {
        "KAFKA": "127.0.0.1:1",
        "KAFKA_SASL_SSL": "localhost:3",
        "KAFKA_SSL": "localhost:4",
        "TOKEN_URL": "https://localhost:5/token",
        "SCHEMA_REGISTRY_TLS_URL": "https://localhost:5/x",
    }


def test_logs_show_the_last_lines_of_each_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of the file they are from."""
    _remember(tmp_path / HOME, 1)
    monkeypatch.chdir(tmp_path)
    log = tmp_path / HOME / "kafka" / "n1" / "broker.log"
    log.parent.mkdir()
    log.write_text("one\ntwo\nthree\n")
    assert CliRunner().invoke(dev, ["status", "--logs", "2"]).output.endswith(f"== {log}\ntwo\nthree\n")
