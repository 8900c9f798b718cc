from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import AsyncMock

import click
import pytest

from headrace.cli.api import address_of
from headrace.cli.cluster_options import find_cluster, find_settings
from headrace.cli.main import main
from headrace.config.dev_endpoints import ENDPOINTS
from headrace.errors import ConfigError
from headrace.kafka import Admin
from yaml_table import table


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("KAFKA", "SCHEMA_REGISTRY_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def found(servers: str | None = None, config: Path | None = None, registry: str | None = None) -> tuple[str, str]:
    with click.Context(click.Command("x")):
        cluster = find_cluster(servers, config, registry)
    return cluster.kafka.bootstrap_servers, cluster.registry.url


def dev_cluster(pid: int) -> None:
    ENDPOINTS.parent.mkdir(parents=True)
    kafka = {"bootstrap_servers": "dev:1", "brokers": [{"id": 1, "pid": pid, "port": 1}]}
    ENDPOINTS.write_text(json.dumps({"kafka": kafka, "schema_registry": {"url": "http://dev:2"}}))


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"kafka": {"brokers": []}}'])
def test_without_a_usable_dev_cluster_localhost_is_used(text: str | None) -> None:
    """Endpoints of a cluster that was killed, or that make no sense, are not used."""
    dev_cluster(2**22 + 1)
    if text is not None:
        ENDPOINTS.write_text(text)
    assert found() == ("localhost:9092", "http://localhost:8081")


def test_option_wins_over_file_over_environment_over_dev_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest word counts; the file's other settings stay."""
    dev_cluster(os.getpid())
    monkeypatch.setenv("KAFKA", "env:1")
    assert found() == ("env:1", "http://dev:2")
    file = folder / "headrace.yaml"
    file.write_text("kafka: {bootstrap_servers: 'file:1', create_topics: false}")
    assert found(config=file) == ("file:1", "http://localhost:8081")
    assert found("option:1", file, "http://option") == ("option:1", "http://option")


def test_every_command_reads_the_file_of_the_folder(folder: Path) -> None:
    """Without -c it is ./headrace.yaml; with -b alone it is not read, as it is about another cluster."""
    file = folder / "headrace.yaml"
    file.write_text("kafka: {bootstrap_servers: 'file:1'}\nhttp: {port: 9001}")
    assert found() == ("file:1", "http://localhost:8081")
    assert address_of(find_settings(None)) == "http://127.0.0.1:9001"
    file.write_text("kafka: [")
    assert found("option:1") == ("option:1", "http://localhost:8081")
    with pytest.raises(ConfigError, match="is not YAML"):
        found()


@pytest.mark.parametrize(("text", "problem"), table(__file__, "commands_that_need_only_kafka_read_only_its_sections"))
def test_commands_that_need_only_kafka_read_only_its_sections(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    """Problems of other sections stop no such command; those of its own sections do, with their line."""
    monkeypatch.setenv("HEADRACE__HTTP__PORT", "many")
    monkeypatch.setattr(Admin, "list_topics", AsyncMock(return_value=[]))
    (folder / "headrace.yaml").write_text(f"kafka: {{bootstrap_servers: 'file:1'}}\n{text}\n")
    with pytest.raises(SystemExit) as ended:
        main(["topics", "list"])
    assert ended.value.code == (78 if problem else 0)
    assert capsys.readouterr().err.startswith(problem)
