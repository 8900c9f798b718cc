"""Several processes behind one port: one run to its clients, its operator and its service manager."""

from __future__ import annotations

import json
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from active_client import Instance, send
from headrace_devkit.devcluster.headrace import HeadraceProcess
from headrace_devkit.testing import MakeTopic, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario


def by_process(run: HeadraceProcess, name: str, **labels: str) -> dict[str, float]:
    """Return the values of a metric by process, from one request."""
    families = text_string_to_metric_families(Scenario.ask(f"{run.url}/metrics").body)
    samples = [one for family in families for one in family.samples if one.name == name]
    return {one.labels["process"]: one.value for one in samples if labels.items() <= one.labels.items()}


def test_two_processes_are_one_run(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Requests reach both, each finds what the other has, metrics and status are of both, and both drain."""
    name, group = topic(4), "g-" + topic()
    push = {"topics": [name], "group": f"{name}-push", "backend": {"url": backend.url}}
    run = headrace({**site.config, "processes": 2, "reactive_consumers": {"push": push}})
    produce, body = f"{run.url}/producers/{name}", {"records": [{"value": 1}]}
    requests = {"name": "headrace_produce_records_total", "result": "acknowledged"}
    records = 0
    while min(by_process(run, **requests).values()) < 2:
        records += send("POST", produce, body).status == 200
        assert records < 100
    for key in range(8):  # each is sent to any process, and remembered by one
        first = [send("POST", produce, body, {"Idempotency-Key": f"key-{key}"}).body for _ in range(4)]
        assert first == first[:1] * 4
    text = {"Content-Type": "text/plain", "Idempotency-Key": "a value"}
    assert len({str(send("POST", produce, 1, text).body) for _ in range(8)}) == 1
    records += 9
    instance = Instance(run.url, group).subscribe(name)
    assert len(instance.read(records)) == records
    readers = {one["name"] for _ in range(6) for one in send("GET", f"{run.url}/adm/consumers").body["consumers"]}
    assert readers == {instance.created.body["instance_id"]}

    def status() -> Any:
        return send("GET", f"{run.url}/adm/reactive-consumers/push").body

    site.wait_until(lambda: all(one["assigned"] for one in status()["partitions"]), "both to be members")
    assert len({one["member"] for one in status()["partitions"]}) == 2
    site.wait_until(lambda: status()["counts"]["delivered"] == records, "every record")
    change = send("POST", f"{run.url}/adm/logger", [{"name": "headrace.kafka", "level": "DEBUG"}])
    levels = {json.dumps(send("GET", f"{run.url}/adm/logger").body) for _ in range(8)}
    assert levels == {json.dumps(change.body)}
    assert set(re.findall('"process":(.)}', run.output)) == {"0", "1"}
    assert len(re.findall("^ready http=", run.output, re.MULTILINE)) == 1
    assert run.terminate() == 0
    assert "Traceback" not in run.output
