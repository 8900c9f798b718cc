from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest

from headrace.cli.connection import ENDPOINTS, Place, find
from headrace.devcluster import environment


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("KAFKA", "SCHEMA_REGISTRY_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def found(servers: str | None = None, config: Path | None = None, registry: str | None = None) -> tuple[str, str]:
    with click.Context(click.Command("x")):
        place: Place = find(servers, config, registry)
    return place.kafka.bootstrap_servers, place.registry.url


def dev_cluster(pid: int) -> None:
    ENDPOINTS.parent.mkdir(parents=True)
    kafka = {"bootstrap_servers": "dev:1", "brokers": [{"id": 1, "pid": pid, "port": 1}]}
    ENDPOINTS.write_text(json.dumps({"kafka": kafka, "schema_registry": {"url": "http://dev:2"}}))


def test_localhost_is_the_last_resort() -> None:
    """With nothing said anywhere, Kafka's and the registry's usual ports."""
    assert found() == ("localhost:9092", "http://localhost:8081")


def test_a_running_dev_cluster_is_found() -> None:
    """The dev cluster of this folder is used when its broker lives."""
    dev_cluster(os.getpid())
    assert found() == ("dev:1", "http://dev:2")


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"kafka": {"brokers": []}}'])
def test_a_dev_cluster_that_is_gone_is_not(text: str | None) -> None:
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
    file.write_text("kafka: {bootstrap_servers: 'file:1', request_timeout_seconds: 3}")
    assert found(config=file) == ("file:1", "http://localhost:8081")
    assert found("option:1", file, "http://option") == ("option:1", "http://option")


def test_what_dev_up_exports_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines for `eval` and the variables that commands read have the same names."""
    for name, value in environment(
        {"kafka": {"bootstrap_servers": "up:1"}, "schema_registry": {"url": "up:2"}}
    ).items():
        monkeypatch.setenv(name, value)
    assert found() == ("up:1", "up:2")
