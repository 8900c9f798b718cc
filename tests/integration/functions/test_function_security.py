"""A function whose trigger has TLS and a login of its own, on a secured cluster."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import Any

import yaml

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from yaml_table import table

CODE = """
def handler(context, event):
    if event.body == b"bad":
        raise ValueError("bad")
    return {"was": event.body.decode()}
"""


def trigger_of(cluster: SecuredCluster, folder: Path) -> dict[str, Any]:
    """Return attributes and annotations of a trigger that logs in as `app`; the secret `ca` is flattened."""
    security, secrets = cluster.security, folder / "secrets/creds"
    known = {
        "ca": security.authority.read_text().strip().replace("\n", "@"),
        "password": security.passwords["app"],
        "secrets": str(secrets),
        "sasl_servers": cluster.cluster.sasl_servers,
    }
    secrets.mkdir(parents=True)
    for name in ("password", "ca"):
        (secrets / name).write_text(known[name])
    made: dict[str, Any] = json.loads(Template(json.dumps(table(__file__, "trigger"))).substitute(known))
    made["attributes"]["brokers"] = made["attributes"]["brokers"].split(",")
    return made


def write_function(
    folder: Path, source: str, *, attributes: dict[str, Any], annotations: dict[str, str] | None = None, **more: Any
) -> Path:
    """Write a handler and its file, private because it may hold secrets."""
    own = {"topics": [source], "consumerGroup": f"{source}-work", "retry": {"attempts": 1}, **more}
    named = {f"nuclio.io/kafka-{name}": value for name, value in (annotations or {}).items()}
    trigger = {"kind": "kafka-cluster", "attributes": {**own, **attributes}}
    spec = {"handler": "work:handler", "triggers": {"in": trigger}}
    (folder / "work.py").write_text(CODE)
    file = folder / "function.yaml"
    file.touch(0o600)
    file.write_text(yaml.safe_dump({"metadata": {"name": "work", "annotations": named}, "spec": spec}))
    return file


def test_a_trigger_reads_another_cluster_than_that_of_the_configuration(
    kafka_secured: SecuredCluster, site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """Its topic is there alone; dead letters are written to the cluster of headrace.yaml, and are created there."""
    source, target = "function-elsewhere", topic()
    kafka_secured.cluster.create_topic(source, 3)
    other = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    other.write(source, *(OutgoingRecord(source, b"k", value) for value in (b"a", b"bad")))
    file = write_function(tmp_path, source, **trigger_of(kafka_secured, tmp_path), outputTopic=target)
    (tmp_path / "work.py").write_text(CODE.replace('{"was"', '{"of": event.num_shards, "was"'))
    process = headrace({**site.config, "functions": [str(file)]})
    site.wait_until(lambda: site.records(target), "the output")
    assert [json.loads(record.value or b"") for record in site.records(target)] == [{"of": 3, "was": "a"}]
    site.wait_until(lambda: site.records(f"{source}.dlq"), "the dead letter")
    assert process.terminate() == 0
    assert kafka_secured.security.passwords["app"] not in process.output
