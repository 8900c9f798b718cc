"""Alert rules and the dashboard in a real Prometheus, which scrapes a Headrace whose backend breaks."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml
from click.testing import CliRunner

from headrace.cli.main import root
from headrace.records import OutgoingRecord
from headrace.runtime.telemetry.metrics import CATALOGUE
from headrace.runtime.telemetry.monitoring import dashboard, queries
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
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


def test_the_dashboard_has_every_metric_and_no_other() -> None:
    """Its queries, and those of the alerts, name what exists."""
    board = dashboard()
    texts = [*queries(board), *(rule["expr"] for rule in rules()["groups"][0]["rules"])]
    named = {re.sub("_bucket$|_count$", "", name) for text in texts for name in re.findall(r"headrace_[a-z_]+", text)}
    assert named == {spec.name for spec in CATALOGUE if spec.name.startswith("headrace_")}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({tuple(panel["gridPos"].values()) for panel in panels}) == len(panels)


@contextlib.contextmanager
def prometheus(site: Any, folder: Path, target: str) -> Iterator[str]:
    """A server that scrapes and evaluates once a second, with alerts that fire at once; yields its URL."""
    made = rules()
    for rule in made["groups"][0]["rules"]:
        rule["for"] = "1s"
    (folder / "rules.yaml").write_text(yaml.safe_dump(made))
    scrapes = [{"job_name": "headrace", "static_configs": [{"targets": [target]}]}]
    often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": often, "rule_files": ["rules.yaml"], "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as output:
        command = [debian_program("prometheus", "prometheus"), *words, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stderr=output)
    try:
        site.wait_until(lambda: site.ask(f"http://{address}/-/ready").status == 200, "Prometheus")
        yield f"http://{address}/api/v1"
    finally:
        process.terminate()
        process.wait()


def test_an_alert_fires_while_the_backend_is_broken(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path
) -> None:
    """And resolves after it; meanwhile every query of the dashboard is accepted, and has series if there are any."""
    name = topic(1)
    site.write(name, *(OutgoingRecord(name, b"k", b"%d" % n) for n in range(100)))
    backend.response = PlannedResponse(status=503)
    target = {"url": backend.url, "mode": "status"}
    consumer = {"topics": [name], "group": f"{name}-push", "backend": target}
    process = headrace({**site.config, "reactive_consumers": {"push": consumer}})
    site.ask(f"{process.url}/producers/{name}", {"records": [{"value": "x"}]})
    with prometheus(site, tmp_path, urlsplit(process.url).netloc) as url:

        def firing() -> set[str]:
            alerts = site.ask(f"{url}/alerts").body["data"]["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

        site.wait_until(lambda: firing() == {"HeadraceBackendDown"}, "the alert")
        backend.response = PlannedResponse()
        site.wait_until(lambda: firing() == set(), "the end of the alert")
        site.wait_committed(f"{name}-push", name, 101)
        exposed = {line.partition("{")[0].split()[0] for line in site.ask(f"{process.url}/metrics").body.splitlines()}

        def empty() -> set[str]:
            without = set()
            for query in queries(dashboard()):
                text = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
                answer = site.ask(f"{url}/query?{urlencode({'query': text})}")
                assert answer.status == 200, (query, answer.body)
                if not answer.body["data"]["result"] and exposed.issuperset(re.findall(r"[a-z]+_[a-z_]+(?={)", query)):
                    without.add(query)
            return without

        site.wait_until(lambda: empty() == set(), "series for every query")
    assert len(exposed) > 35
