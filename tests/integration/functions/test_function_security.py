"""Functions whose triggers have TLS and a login of their own, on a secured cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.records import OutgoingRecord
from headrace.testing.scenario import Scenario
from headrace.testing.secured import SecuredCluster

CODE = """
def handler(context, event):
    if event.body == b"bad":
        raise ValueError("bad")
    return {"was": event.body.decode()}
"""


def flat(file: Path) -> str:
    """Return the text of a PEM file as annotations hold it."""
    return file.read_text().strip().replace("\n", "@")


def trigger_of(cluster: SecuredCluster, way: str, folder: Path) -> tuple[dict[str, Any], dict[str, str], list[Any]]:
    """Return attributes, annotations and volumes of a trigger that logs in as `app`."""
    security, sasl = cluster.security, {"brokers": cluster.cluster.sasl_servers.split(",")}
    password, authority = str(security.folder / "app.password"), str(security.authority)
    if way == "attributes":
        login = {"enable": True, "user": "app", "password": security.passwords["app"], "mechanism": "scram-sha-512"}
        return {**sasl, "caCert": authority, "sasl": login}, {}, []
    if way == "secret":
        creds = folder / "secrets/creds"
        creds.mkdir(parents=True)
        (creds / "password").write_text(security.passwords["app"])
        (creds / "ca").write_text(flat(security.authority))
        annotations = {
            "secret-path": "/etc/creds",
            "ca-cert": "ca",
            "sasl-enabled": "true",
            "sasl-user": "app",
            "sasl-password": "password",
            "sasl-mechanism": "SCRAM-SHA-256",
        }
        volume = {
            "volume": {"name": "c", "secret": {"secretName": "creds"}},
            "volumeMount": {"mountPath": "/etc/creds"},
        }
        return sasl, annotations, [volume]
    if way == "certificates":
        files = {"ca-cert": security.authority, "access-key": "app.key", "access-cert": "app.pem"}
        annotations = {name: flat(security.folder / file) for name, file in files.items()}
        return {"brokers": cluster.cluster.tls_servers.split(",")}, annotations, []
    oauth = {
        "clientID": "app",
        "clientSecret": password,
        "tokenURL": cluster.tokens.token_url,
        "scopes": ["read", "write"],
        "caCert": authority,
    }
    return {**sasl, "caCert": authority, "sasl": {"enable": True, "mechanism": "OAUTHBEARER", "oauth": oauth}}, {}, []


def write_function(
    folder: Path, source: str, parts: tuple[dict[str, Any], dict[str, str], list[Any]], **more: Any
) -> Path:
    """Write a handler and its file, private because it may hold secrets."""
    attributes, annotations, volumes = parts
    own = {"topics": [source], "consumerGroup": f"{source}-work", "attempts": 1, **more}
    named = {f"nuclio.io/kafka-{name}": value for name, value in annotations.items()}
    trigger = {"kind": "kafka-cluster", "attributes": {**own, **attributes}}
    spec = {"handler": "work:handler", "volumes": volumes, "triggers": {"in": trigger}}
    (folder / "work.py").write_text(CODE)
    file = folder / "function.yaml"
    file.touch(0o600)
    file.write_text(yaml.safe_dump({"metadata": {"name": "work", "annotations": named}, "spec": spec}))
    return file


@pytest.mark.parametrize("way", ["attributes", "secret", "certificates", "oauth"])
def test_a_trigger_with_a_login_of_its_own_reads_and_its_results_are_written(
    kafka_secured: SecuredCluster, headrace: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    """headrace.yaml uses the listener without login, so only the trigger's own login can read the other one.

    Outputs and dead letters go to the cluster of headrace.yaml.
    """
    source, target = f"function-{way}", f"function-{way}-out"
    for name in (source, target):
        kafka_secured.cluster.create_topic(name)
    scenario = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    scenario.write(source, *(OutgoingRecord(source, b"k", value) for value in (b"a", b"bad", b"b")))
    file = write_function(tmp_path, source, trigger_of(kafka_secured, way, tmp_path), outputTopic=target)
    secrets = {"functions_secrets_dir": str(tmp_path / "secrets")} if way == "secret" else {}
    process = headrace({**scenario.config, **secrets, "functions": [str(file)]})
    scenario.wait_committed(f"{source}-work", source, 3)
    assert [json.loads(record.value or b"") for record in scenario.records(target)] == [{"was": "a"}, {"was": "b"}]
    assert [record.value for record in scenario.records(f"{source}.dlq")] == [b"bad"]
    assert process.terminate() == 0
    assert kafka_secured.security.passwords["app"] not in process.output
    assert process.output.count("Traceback") == 1, "the handler's"


def test_a_trigger_reads_another_cluster_than_that_of_the_configuration(
    kafka_secured: SecuredCluster, site: Scenario, topic: Any, headrace: Callable[..., Any], tmp_path: Path
) -> None:
    """Its topic is there alone; dead letters are written to the cluster of headrace.yaml, and are created there."""
    source, target = "function-elsewhere", topic()
    kafka_secured.cluster.create_topic(source, 3)
    other = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    other.write(source, *(OutgoingRecord(source, b"k", value) for value in (b"a", b"bad")))
    file = write_function(tmp_path, source, trigger_of(kafka_secured, "attributes", tmp_path), outputTopic=target)
    (tmp_path / "work.py").write_text(CODE.replace('{"was"', '{"of": event.num_shards, "was"'))
    process = headrace({**site.config, "functions": [str(file)]})
    site.wait_until(lambda: site.records(target), "the output")
    assert [json.loads(record.value or b"") for record in site.records(target)] == [{"of": 3, "was": "a"}]
    site.wait_until(lambda: site.records(f"{source}.dlq"), "the dead letter")
    assert process.terminate() == 0


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"sasl": {"enable": True, "user": "app", "password": "/canary"}}, "sasl.password: names no file"),
        ({"tls": {"enable": False}}, "has plaintext on the brokers of headrace.yaml"),
    ],
)
def test_wrong_settings_end_the_start_with_file_and_line(
    kafka_secured: SecuredCluster, tmp_path: Path, attributes: dict[str, Any], problem: str
) -> None:
    """`run` and `config check` say the same."""
    write_function(tmp_path, "t", (attributes, {}, []))
    config = {"kafka": kafka_secured.login(), "functions": ["function.yaml"]}
    (tmp_path / "headrace.yaml").write_text(yaml.safe_dump(config))
    scenario = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    for command in (["run"], ["config", "check"]):
        failed = scenario.cli(*command, "-c", "headrace.yaml", code=78)
        assert problem in failed.stderr
        assert f"{tmp_path}/function.yaml:" in failed.stderr
        assert "canary" not in failed.stderr
