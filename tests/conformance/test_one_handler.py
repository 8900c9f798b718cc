"""One handler of each kind: the same records have the same ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file

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


@pytest.mark.parametrize("kind", ["batch", *(pytest.param(one, marks=pytest.mark.long) for one in ("plain", "async"))])
def test_a_handler_has_the_same_ends(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path, kind: str
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
        "retry": {"attempts": 2},
    }
    trigger: dict[str, Any] = {"kind": "kafka-cluster", "numWorkers": 1, "attributes": attributes}
    if kind == "batch":
        trigger["batch"] = {"mode": "enable", "batchSize": 4}
    file = function_file(tmp_path, HANDLE + HANDLERS[kind], {"in": trigger})
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
    headrace({**site.config, "functions": [file]})
    site.wait_committed(f"{source}-work", source, len(records))

    outputs = {(record.key, record.value, tuple(record.headers)) for record in site.records(target)}
    response = (b"k2 \xff", b'{"how":"response"}', (("x", b"1"),))
    assert outputs == {(b"k1 \xff", b"output", ()), response, (LAST, b"output", ())}
    emitted = {(record.key, record.value) for record in site.records(f"{source}-emitted")}
    where = f'{{"id":"{source}-0-3"}}'.encode()
    assert emitted == {(b"other", where), (b"k3 \xff", "é".encode()), (b"tombstone", None)}
    dead_letters = [record.key for record in site.records(f"{source}.dlq")]
    assert sorted(key or b"" for key in dead_letters) == [b"k4 \xff", b"k5 \xff", b"k6 \xff", BROKEN]


def test_a_record_of_kafka_is_called_in_the_foreground(site: Scenario, topic: MakeTopic, tmp_path: Path) -> None:
    """The handler sees what the record is; nothing is written, and no group exists afterwards."""
    source, target = topic(2), topic()
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "outputTopic": target}
    code = (
        "def handler(context, event):\n"
        "    return {'id': event.id, 'h': event.headers['h'].decode(), 'of': event.num_shards, 'is': event.body}\n"
    )
    function_file(tmp_path, code, {"in": {"kind": "kafka-cluster", "attributes": attributes}})
    site.write(source, *(OutgoingRecord(source, b"k", b"v%d" % n, [("h", b"%d" % n)], 1) for n in range(3)))
    done = site.cli("function", "test", ".", "--record", f"{source}:1:1", "--output", "json")
    (output,) = json.loads(done.stdout)["outputs"]
    seen = {"id": f"{source}-1-1", "h": "1", "of": 2, "is": "djE="}
    assert (output["topic"], output["key"], json.loads(output["value"])) == (target, "k", seen)
    assert site.records(target) == []
    assert site.committed(f"{source}-work") == {}
    problem = site.cli("function", "test", ".", "--record", f"{source}:1:3", code=1).stderr
    assert f"offset 3 is not in {source}-1: it holds 0 to 2" in problem
