"""Alert rules and the dashboard, read by the program of Prometheus that checks rules."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from headrace.cli.main import root
from headrace.runtime.telemetry.metrics import CATALOGUE
from headrace.runtime.telemetry.monitoring import dashboard, queries
from tests.debian_package import debian_program
from yaml_table import table

CASES = table(__file__, "alerts")


def rules() -> dict[str, Any]:
    done = CliRunner().invoke(root, ["generate", "alerts", "--runbooks", "https://example.org/operations"])
    assert done.exit_code == 0, done.output
    return yaml.safe_load(done.stdout)


def promtool(folder: Path, *words: str) -> None:
    command = [debian_program("promtool", "prometheus"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_in_time_and_not_before(tmp_path: Path) -> None:
    """For its series alone; the table has a case for each alert."""
    made = rules()
    found = {rule["alert"]: rule for rule in made["groups"][0]["rules"]}
    assert found.keys() == CASES.keys()
    tests = []
    for name, case in CASES.items():
        texts = {**found[name]["annotations"], "summary": case["summary"]}
        labels = {**found[name]["labels"], **case["labels"]}
        fired = [{"exp_labels": labels, "exp_annotations": texts}]
        times = ((case["quiet"], []), (case["fires"], fired))
        series = [{"series": one, "values": str(values)} for one, values in case["series"].items()]
        asked = [{"eval_time": at, "alertname": name, "exp_alerts": expected} for at, expected in times]
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": asked})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(made))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool(tmp_path, "check", "rules", "rules.yaml")
    promtool(tmp_path, "test", "rules", "test.yaml")


def test_the_dashboard_has_every_metric_and_no_other(tmp_path: Path) -> None:
    """Its queries, and those of the alerts, name what exists, and Prometheus accepts them."""
    board = dashboard()
    asked = [query.replace("$__rate_interval", "1m").replace("$instance", ".*") for query in queries(board)]
    checked = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(asked)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": checked}]}))
    promtool(tmp_path, "check", "rules", "--lint=none", "queries.yaml")
    texts = [*queries(board), *(rule["expr"] for rule in rules()["groups"][0]["rules"])]
    named = {re.sub("_bucket$|_count$", "", name) for text in texts for name in re.findall(r"headrace_[a-z_]+", text)}
    assert named == {spec.name for spec in CATALOGUE if spec.name.startswith("headrace_")}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({tuple(panel["gridPos"].values()) for panel in panels}) == len(panels)
