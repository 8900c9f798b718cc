"""`headrace doctor` and `durability` against a broker of one, as on every developer's machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_devkit.devcluster.certificates import Authority
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario


def whole(site: Any, name: str, **more: Any) -> dict[str, Any]:
    consumer = {"topics": [name], "group": f"{name}-g", "backend": {"url": "http://127.0.0.1:9/"}}
    return {**site.config, "reactive_consumers": {"push": consumer}, **more}


def rows_of(output: str) -> dict[tuple[str, str], str]:
    """Return the states; what is too little on this machine, as any may have it, is left out."""
    return {(row["about"], row["check"]): row["state"] for row in json.loads(output) if row["about"] != "machine"}


def test_the_doctor_examines_what_the_file_uses(
    site: Scenario, topic: MakeTopic, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every precondition is in the table with what to do; a failing one is the exit code."""
    name = topic(1, retention_ms=3_600_000)
    file = tmp_path / "headrace.yaml"
    short = Authority(tmp_path, "ca").issue("short", days=9).certificate
    backend = {"url": "https://127.0.0.1:9/", "tls": {"ca": str(short)}}
    consumer = {"topics": [name], "group": f"{name}-g", "backend": backend}
    file.write_text(yaml.safe_dump(whole(site, name, reactive_consumers={"push": consumer})))
    rows = rows_of(site.cli("doctor", "-c", str(file), "--output", "json", code=1).stdout)
    assert rows[f"topic {name}", "replication factor"] == "failing"
    assert rows[f"topic {name}", "min.insync.replicas"] == "failing"
    assert rows[f"topic {name}", "unclean leader election"] == "ok"
    assert rows[f"topic {name}", "retention"] == "failing"
    assert rows[f"topic {name}.dlq", "exists"] == "ok"
    assert rows["cluster", "bootstrap servers"] == "warning"
    assert rows["cluster", "reachable"] == "ok"
    assert rows["reactive_consumers.push.backend.tls.ca", "certificate"] == "warning"
    if request.config.getoption("--secured"):
        assert rows["cluster", "configuration"] == "warning", "the login has no right to read it"
    else:
        assert rows[f"group {name}-g", f"offsets.retention.minutes, {name}"] == "ok"
    text = site.cli("doctor", name, code=1).stdout
    assert "min.insync.replicas=2" in text


def test_the_doctor_says_what_is_not_there(site: Scenario, tmp_path: Path) -> None:
    """Topic, broker, registry, ksqlDB; without topics only the cluster counts, and one broker is a warning."""
    rows = rows_of(site.cli("doctor", "no-such-topic", "--output", "json", code=1).stdout)
    assert rows["topic no-such-topic", "exists"] == "failing"
    assert "failing" not in rows_of(site.cli("doctor", "--output", "json").stdout).values()
    file = tmp_path / "headrace.yaml"
    away = {"bootstrap_servers": "127.0.0.1:9"}
    servers = {"schema_registry": {"url": "http://127.0.0.1:9"}, "ksqldb": {"url": "http://127.0.0.1:9"}}
    file.write_text(yaml.safe_dump({"kafka": away, **servers}))
    rows = rows_of(site.cli("doctor", "-c", str(file), "--output", "json", code=1).stdout)
    assert rows == {(name, "reachable"): "failing" for name in ("schema registry", "ksqlDB server", "cluster")}
    file.write_text(yaml.safe_dump({"kafka": away}))
    rows = rows_of(site.cli("doctor", "-c", str(file), "--output", "json", code=1).stdout)
    assert rows == {("cluster", "reachable"): "failing"}, "a registry that the file does not name gets no request"


def test_report_starts_and_says_it_and_strict_refuses(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace
) -> None:
    """In readiness and log one line about a cluster of one broker; the refusal names every check."""
    name = topic()
    process = headrace(whole(site, name))
    said = "cluster: number of brokers is 1"

    def details() -> str:
        services = site.ask(f"{process.url}/health/readiness").body["services"]
        return str(services["durability"].get("reason"))

    site.wait_until(lambda: said in details(), "the detail")
    assert process.output.count(" is 1: ") == 1
    said = f"topic {name}: replication factor is 1"
    refused = headrace(whole(site, name, durability="strict"), wait=False)
    site.wait_until(lambda: "durability is strict" in refused.output, "the refusal")
    assert said in refused.output
    site.wait_until(lambda: refused.exit_code == 1, "the exit code")
