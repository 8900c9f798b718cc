"""Handlers of functions in pipelines, on a real broker and a real Spark."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.pipelines.load import load_pipeline
from tests.integration.test_pipeline_kinds import records_of
from tests.integration.test_pipelines import produce, running, until

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
HANDLERS = '''\
import asyncio
import os

def init_context(context):
    """Count set-ups and processes."""
    context.user_data.pid = os.getpid()
    with open("{folder}/setups", "a") as file:
        file.write(f"{{os.getpid()}}\\n")

def several(context, event):
    if event.body["id"] % 10 == 7:
        raise ValueError("seven")
    if event.body["id"] % 10 == 8:
        context.emit("{other}", key="emitted", value=event.body, headers={{"h": "x"}})
    return [event.body["id"]] * (event.body["id"] % 3)

async def waits(context, event):
    await asyncio.sleep(0)
    return context.Response(body=f"{{event.id}} {{event.key}}", headers={{"pid": str(context.user_data.pid)}})
'''
FILE = """\
name: handlers
trigger: {{interval_seconds: 0.1, max_records: 100}}
sources:
  flights: {{topic: {source}, schema: "id INT, carrier STRING, arr_delay DOUBLE"}}
views:
  odd: SELECT * FROM flights WHERE id % 2 = 1
flows:
  several:
    handler: "main:several"
    reads: [flights]
    attempts: 2
    sink: {{topic: {out}, delivery: exactly_once, scope: task}}
  waits: {{handler: "main:waits", reads: [flights], sink: {{topic: {waits}}}}}
  dropped:
    handler: "main:several"
    reads: [flights]
    on_error: drop
    sink: {{topic: {dropped}, delivery: exactly_once}}
  example: {{handler: example/function.yaml, reads: [odd], sink: {{topic: {late}}}}}
"""


async def test_handlers_write_any_number_of_records_and_dead_letters(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Outputs, emitted records and dead letters of a plain and an async handler; each worker is set up once; the
    example's function.yaml runs unmodified over a view."""
    source, out, other, waits, dropped, late = topic(2), topic(), topic(), topic(), topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    shutil.copytree(ROOT / "examples" / "function", tmp_path / "example")
    # The example's module is named main too.
    (tmp_path / "main.py").write_text(HANDLERS.format(folder=tmp_path, other=other))
    file = tmp_path / "handlers.yaml"
    file.write_text(FILE.format(source=source, out=out, waits=waits, dropped=dropped, late=late))
    spec = load_pipeline(file, check=True)
    values = [json.dumps({"id": n, "carrier": f"C{n}", "arr_delay": float(n)}).encode() for n in range(300)]
    produce(kafka.bootstrap_servers, source, [*values, b"{bad", None])
    async with running(spec.model_dump(by_alias=True), settings, tmp_path / "state") as run:
        await until(lambda: all(run.counts(flow)["read"] == 302 for flow in spec.flows), run)
        assert run.status()["flows"]["several"]["broken_rules"] == {"failed": 32}
        assert run.status()["flows"]["dropped"]["broken_rules"] == {"failed": 32}
        assert run.status()["restarts"] == 0
    async with running(spec.model_dump(by_alias=True), settings, tmp_path / "state") as run:  # from the checkpoints
        produce(kafka.bootstrap_servers, source, [json.dumps({"id": 2000, "carrier": "C", "arr_delay": None}).encode()])
        await until(lambda: all(run.counts(flow)["read"] == 1 for flow in spec.flows), run)
    good = [n for n in range(300) if n % 10 != 7]
    expected = Counter({n: n % 3 for n in good if n % 3})
    for name in (out, dropped):
        found = [record for record in await records_of(settings, name) if record.value != b"2000"]
        assert Counter(int(record.value or b"") for record in found) == expected
        assert all(record.key == b"k%d" % int(record.value or b"") for record in found)
    emitted = await records_of(settings, other)
    assert Counter(json.loads(each.value or b"")["id"] for each in emitted) == Counter([*range(8, 300, 10)] * 2)
    assert {(each.key, *each.headers) for each in emitted} == {(b"emitted", ("h", b"x"))}
    await _check_dead_letters(settings, source, out, values)
    await _check_set_ups(settings, waits, tmp_path / "setups")
    words = {
        json.loads(each.value or b"")["id"]: json.loads(each.value or b"")["arrival"]
        for each in await records_of(settings, late)
    }
    assert words.keys() == {*range(1, 300, 2)}
    assert (words[1], words[17], words[61]) == ("a little late", "late", "very late")


async def _check_dead_letters(settings: KafkaConfig, source: str, out: str, values: list[bytes]) -> None:
    dead = await records_of(settings, f"{out}.dlq")
    assert Counter(each.value for each in dead) == Counter([*values[7::10], b"{bad", None])
    letter = dict(next(each for each in dead if each.value == values[7]).headers)
    assert (letter["headrace.dlq.attempts"], letter["headrace.dlq.topic"]) == (b"2", source.encode())
    assert letter["headrace.dlq.reason"] == b"ValueError: seven"


async def _check_set_ups(settings: KafkaConfig, waits: str, file: Path) -> None:
    answers = await records_of(settings, waits)
    assert len(answers) == 302
    pids = {dict(each.headers)["pid"] for each in answers}
    setups = file.read_text().split()
    assert len(setups) == len(set(setups))
    assert {pid.decode() for pid in pids if pid} <= set(setups)


@pytest.mark.long
async def test_a_failure_stops_the_flow_if_it_shall(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Readiness names the record and the error; the value is not shown."""
    source, out = topic(), topic()
    (tmp_path / "main.py").write_text("def handler(context, event):\n    raise KeyError(event.body['secret'])\n")
    spec = {
        "name": "fails",
        "folder": str(tmp_path),
        "sources": {"a": {"topic": source, "schema": "x INT"}},
        "flows": {"f": {"handler": "main:handler", "reads": ["a"], "on_error": "fail", "sink": {"topic": out}}},
    }
    produce(kafka.bootstrap_servers, source, [b'{"secret": "c4nary"}'])
    async with running(spec, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path / "state") as run:
        await until(lambda: "KeyError" in run.readiness().reason, run)
        assert f"{source}-0-0 failed with KeyError after 1 attempts, and on_error is fail" in run.readiness().reason
        assert "c4nary" not in run.readiness().reason
