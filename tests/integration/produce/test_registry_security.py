"""A schema registry behind TLS and a login, through the running product."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_devkit.devcluster import Registry
from headrace_devkit.devcluster.token_server import TokenServer
from headrace_devkit.testing import StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import send

BODY = {"valueFormat": "avro", "valueSchema": '"long"', "records": [{"value": 1}]}


@pytest.fixture(scope="module")
def front(
    kafka_secured: SecuredCluster, schema_registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Protect the registry; give the section `schema_registry` of the user `app`."""
    folder, port = tmp_path_factory.mktemp("front"), schema_registry.ports[0]
    server = TokenServer(folder, kafka_secured.security, registry_port=port)
    server.start()
    try:
        yield {
            "url": server.registry_url + schema_registry.path,
            "username": "app",
            "password": f"${{file:{kafka_secured.security.folder / 'app'}.password}}",
            "tls": {"ca": str(kafka_secured.security.authority)},
        }
    finally:
        server.remove()


def test_the_command_line_reads_with_the_registry_of_the_file(
    kafka_secured: SecuredCluster, front: dict[str, Any], headrace: StartHeadrace, tmp_path: Path
) -> None:
    """`consume` decodes, and `doctor` reports the registry."""
    kafka_secured.cluster.create_topic("registry-cli")
    config = {"kafka": kafka_secured.login(), "schema_registry": front}
    process = headrace(config)
    assert send("POST", f"{process.url}/producers/registry-cli", BODY).status == 200
    (tmp_path / "headrace.yaml").write_text(yaml.safe_dump(config))
    scenario = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    shown = scenario.cli("consume", "registry-cli", "-c", "headrace.yaml", "--format", "avro", "--max", "1")
    assert shown.stdout == "1\n"
    config["schema_registry"] = {**front, "password": "canary"}
    (tmp_path / "headrace.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "headrace.yaml").chmod(0o600)
    report = scenario.cli("doctor", "-c", "headrace.yaml", code=1).stdout
    assert "refuses the login (HTTP 401)" in report
    assert "canary" not in report


def wait_for_reason(scenario: Scenario, url: str, text: str) -> None:
    """Wait until only the registry is missing, for a reason with this text."""

    def found() -> bool:
        reasons = scenario.reasons(url)
        return set(reasons) == {"schema registry"} and text in reasons["schema registry"]

    scenario.wait_until(found, f"readiness to say {text}")


def test_an_authority_and_a_password_that_change_on_disk_are_taken_up(
    kafka_secured: SecuredCluster, front: dict[str, Any], headrace: StartHeadrace, tmp_path: Path
) -> None:
    """The response and readiness name the setting that is wrong; with the right files the process recovers."""
    kafka_secured.cluster.create_topic("registry-rotation")
    authority, password = tmp_path / "authority.pem", tmp_path / "password"
    shutil.copy(kafka_secured.security.folder / "other-ca.pem", authority)
    password.touch(0o600)
    password.write_text("old")
    registry = {**front, "tls": {"ca": str(authority)}, "password": f"${{file:{password}}}"}
    process = headrace({"kafka": kafka_secured.login(), "schema_registry": registry}, wait=False)
    scenario, url = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path), f"{process.url}/producers/"
    scenario.wait_until(lambda: scenario.ask(f"{process.url}/health/liveness").status == 200, "the listener")
    wait_for_reason(scenario, process.url, "set its authority in schema_registry.tls.ca")
    response = send("POST", f"{url}registry-rotation", BODY)
    assert (response.status, "schema_registry.tls.ca" in response.body["description"]) == (503, True)
    shutil.copy(kafka_secured.security.authority, tmp_path / "new.pem")
    (tmp_path / "new.pem").replace(authority)
    wait_for_reason(scenario, process.url, "Correct schema_registry.username and password")
    assert "reloaded the certificates of schema_registry.tls" in process.output
    password.write_text(kafka_secured.security.passwords["app"])
    scenario.wait_until(lambda: send("POST", f"{url}registry-rotation", BODY).status == 200, "the new password")
