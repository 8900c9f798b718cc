"""One handler, several engines: the same file has the same ends in `function run` and behind a reactive consumer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from headrace.records import OutgoingRecord
from headrace.testing.scenario import Scene
from headrace.testing.secured import command_environment

pytestmark = pytest.mark.xdist_group("functions")

HANDLE = """
def handle(context, event, emitted):
    how = event.body if event.body is None else event.body["how"]
    if how is None:
        emitted("tombstone", None)
    elif how == "emit":
        emitted("other", {"id": event.id})
        emitted(event.key, event.headers["h"])
    elif how == "emit and refuse":
        emitted("never", "x")
        return 400, "no"
    elif how == "refuse":
        return context.Response(body="no", status_code=500)
    elif how == "raise":
        raise ValueError("no")
    elif how == "response":
        return context.Response({"x": "1"}, {"how": how})
    elif how == "output":
        return how
"""
HANDLERS = {
    "plain": """
def handler(context, event):
    return handle(context, event, lambda key, value: context.emit(event.topic + "-emitted", key, value))
""",
    "async": """
import asyncio


async def handler(context, event):
    await asyncio.sleep(0)
    return handle(context, event, lambda key, value: context.emit(event.topic + "-emitted", key, value))
""",
    "batch": """
async def handler(context, events):
    def one(event):
        emit = lambda key, value: context.emit(event.topic + "-emitted", key, value, event=event)
        return handle(context, event, emit)
    return [one(event) for event in events]
""",
}
WAYS = "nothing", "output", "response", "emit", "emit and refuse", "refuse", "raise", "nothing"
BROKEN, TOMBSTONE, LAST = b"undecodable", b"tombstone", b"last"


class Function(NamedTuple):
    """A function file, and the topics and group that are its own."""

    file: Path
    source: str
    group: str
    attributes: dict[str, Any]


@pytest.fixture
def backend(site: Scene, tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Start `headrace function serve FILE`, and return its URL."""
    started: list[subprocess.Popen[str]] = []

    def start(file: Path) -> str:
        command = [str(Path(sys.executable).with_name("headrace")), "function", "serve", str(file), "--port", "0"]
        env = {**os.environ, **command_environment(site.kafka.bootstrap_servers, tmp_path)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
        started.append(process)
        assert process.stdout
        return process.stdout.readline().strip().removeprefix("ready http=")

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def run_as_function(site: Scene, headrace: Any, backend: Any, function: Function) -> None:
    """Run it by `headrace run`, as consumer and worker in one."""
    headrace({**site.config, "functions": [str(function.file)]})


def run_behind_a_consumer(site: Scene, headrace: Any, backend: Any, function: Function) -> None:
    """Serve it by HTTP to a reactive consumer with the same policy."""
    consumer = {
        "topics": [function.source],
        "group": function.group,
        "value_format": function.attributes["valueFormat"],
        "key_format": "binary",
        "retry": {"attempts": function.attributes["attempts"], "first_delay_seconds": 0.05},
        "backend": {"url": backend(function.file), "timeout_seconds": 60},
    }
    headrace({**site.config, "reactive_consumers": {"served": consumer}})


ENGINES: dict[str, Callable[[Scene, Any, Any, Function], None]] = {
    "function run": run_as_function,
    "function serve": run_behind_a_consumer,
}
"""Each starts a function, and returns when it is about to consume; a further engine joins here."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", HANDLERS)
def test_a_handler_has_the_same_ends(
    site: Scene, topic: Any, headrace: Any, backend: Any, tmp_path: Path, kind: str, engine: str
) -> None:
    """Outputs, emitted records, dead letters, the committed offset: each record ends once and in one way."""
    source = topic()
    target = f"{source}-made"
    site.cli("topics", "create", f"{source}-emitted")
    attributes = {
        "topics": [source],
        "consumerGroup": f"{source}-work",
        "valueFormat": "json",
        "outputTopic": target,
        "attempts": 2,
    }
    trigger: dict[str, Any] = {"kind": "kafka-cluster", "numWorkers": 1, "attributes": attributes}
    if kind == "batch":
        trigger["batch"] = {"mode": "enable", "batchSize": 4}
    spec = {"handler": "work:handler", "triggers": {"in": trigger}}
    (tmp_path / "function.yaml").write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": spec}))
    (tmp_path / "work.py").write_text(HANDLE + HANDLERS[kind])
    headers = [("h", "é".encode())]
    records = [
        OutgoingRecord(source, b"k%d \xff" % n, b'{"how": "%s"}' % how.encode(), headers, 0)
        for n, how in enumerate(WAYS)
    ]
    records += [
        OutgoingRecord(source, BROKEN, b"{", headers, 0),
        OutgoingRecord(source, TOMBSTONE, None, None, 0),
        OutgoingRecord(source, LAST, b'{"how": "output"}', None, 0),
    ]
    site.write(source, *records)
    ENGINES[engine](site, headrace, backend, Function(tmp_path / "function.yaml", source, f"{source}-work", attributes))
    site.wait_committed(f"{source}-work", source, len(records))

    outputs = {(record.key, record.value, tuple(record.headers)) for record in site.records(target)}
    response = (b"k2 \xff", b'{"how":"response"}', (("x", b"1"),))
    assert outputs == {(b"k1 \xff", b"output", ()), response, (LAST, b"output", ())}
    emitted = {(record.key, record.value) for record in site.records(f"{source}-emitted")}
    where = f'{{"id":"{source}-0-3"}}'.encode()
    assert emitted == {(b"other", where), (b"k3 \xff", "é".encode()), (b"tombstone", None)}
    dead_letters = [record.key for record in site.records(f"{source}.dlq")]
    assert sorted(key or b"" for key in dead_letters) == [b"k4 \xff", b"k5 \xff", b"k6 \xff", BROKEN]


def test_a_record_of_kafka_is_called_in_the_foreground(site: Scene, topic: Any, tmp_path: Path) -> None:
    """The handler sees what the record is; nothing is written, and no group exists afterwards."""
    source, target = topic(2), topic()
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "outputTopic": target}
    trigger = {"kind": "kafka-cluster", "attributes": attributes}
    spec = {"handler": "work:handler", "triggers": {"in": trigger}}
    (tmp_path / "function.yaml").write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": spec}))
    (tmp_path / "work.py").write_text(
        "def handler(context, event):\n"
        "    return {'id': event.id, 'h': event.headers['h'].decode(), 'of': event.num_shards, 'is': event.body}\n"
    )
    site.write(source, *(OutgoingRecord(source, b"k", b"v%d" % n, [("h", b"%d" % n)], 1) for n in range(3)))
    done = site.cli("function", "test", ".", "--record", f"{source}:1:1", "--output", "json")
    (output,) = json.loads(done.stdout)["outputs"]
    seen = {"id": f"{source}-1-1", "h": "1", "of": 2, "is": "djE="}
    assert (output["topic"], output["key"], json.loads(output["value"])) == (target, "k", seen)
    assert site.records(target) == []
    assert site.committed(f"{source}-work") == {}
    problem = site.cli("function", "test", ".", "--record", f"{source}:1:3", code=1).stderr
    assert f"offset 3 is not in {source}-1: it holds 0 to 2" in problem
