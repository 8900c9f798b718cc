"""Functions in a running process: the example unchanged, Avro in, JSON out, failures, shutdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, Registry, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

EXAMPLE = Path(__file__).parents[3] / "examples" / "function"


def test_the_example_runs_unchanged(site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path) -> None:
    """Only its topics and group are renamed; flights come out with a word, and keep their keys."""
    source, target = topic(2), topic(2)
    text = (EXAMPLE / "function.yaml").read_text()
    text = text.replace("flights-how-late", target).replace("[flights]", f"[{source}]")
    text = text.replace("consumerGroup: how-late", f"consumerGroup: {source}-work")
    (tmp_path / "function.yaml").write_text(text)
    (tmp_path / "main.py").write_text((EXAMPLE / "main.py").read_text())
    process = headrace({**site.config, "functions": [str(tmp_path / "function.yaml")]})
    delays = [75, 20, 3, -4, None]
    body = {"records": [{"key": f"k{d}", "value": {"carrier": "UA", "arr_delay": d}} for d in delays]}
    assert site.ask(f"{process.url}/producers/{source}", body).status == 200
    site.wait_until(lambda: len(site.records(target)) == 4, "the outputs")
    found = {record.key: json.loads(record.value or b"") for record in site.records(target)}
    assert {key: value["arrival"] for key, value in found.items()} == {
        b"k75": "very late",
        b"k20": "late",
        b"k3": "a little late",
        b"k-4": "on time",
    }
    assert all(("carrier", b"UA") in record.headers for record in site.records(target))
    assert process.terminate() == 0
    assert sum(site.committed(f"{source}-work").values()) == len(delays)
    assert "Traceback" not in process.output


def test_avro_comes_in_decoded_and_json_goes_out(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess], schema_registry: Registry
) -> None:
    """The handler sees plain values; logical types are written as text; the key travels byte for byte."""
    source, target = topic(), topic()
    code = "def handler(context, event):\n    return {**event.body, 'seen': type(event.body['at']).__name__}\n"
    registry = {"schema_registry": {"url": schema_registry.url}}
    process = function(source, code, more=registry, valueFormat="avro", outputTopic=target)
    fields = [
        {"name": "n", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ]
    schema = {"type": "record", "name": "Flight", "fields": fields}
    values = [{"n": 2**60, "name": {"string": "é"}, "at": 1_357_020_000_000}, {"n": 1, "name": None, "at": 0}]
    body = {
        "keyFormat": "binary",
        "valueFormat": "avro",
        "valueSchema": json.dumps(schema),
        "records": [{"key": "/v8=", "value": value} for value in values],
    }
    response = site.ask(f"{process.url}/producers/{source}", body)
    assert response.status == 200, response.body
    site.wait_until(lambda: len(site.records(target)) == 2, "the outputs")
    first, second = site.records(target)
    assert first.key == second.key == b"\xfe\xff"
    outputs = [json.loads(record.value or b"") for record in (first, second)]
    assert [(output["n"], output["name"], output["seen"]) for output in outputs] == [
        (2**60, "é", "datetime"),
        (1, None, "datetime"),
    ]
    assert outputs[0]["at"].startswith("2013-01-01T06:00:00")


def test_a_handler_that_raises_is_retried_and_then_a_dead_letter(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """Two attempts as the file says, the user's stack in the dead letter, neighbours untouched; redriven later."""
    source, target = topic(), topic()
    code = (
        "def handler(context, event):\n"
        "    if event.body['n'] == 1:\n"
        "        raise KeyError('no such airport')\n"
        "    return event.body\n"
    )
    own = [("trace", b"\x00\xff")]
    site.write(source, *(OutgoingRecord(source, b"k%d" % n, b'{"n": %d}' % n, own) for n in range(3)))
    process = function(source, code, valueFormat="json", outputTopic=target, retry={"attempts": 2})
    site.wait_committed(f"{source}-work", source, 3)
    assert [record.key for record in site.records(target)] == [b"k0", b"k2"]
    (dead_letter,) = site.records(f"{source}.dlq")
    assert (dead_letter.key, dead_letter.value, dead_letter.headers[:1]) == (b"k1", b'{"n": 1}', own)
    history = dict(dead_letter.headers)
    assert history["headrace.dlq.attempts"] == b"2"
    assert history["headrace.dlq.error"] == b"KeyError"
    assert history["headrace.dlq.reason"] == b"KeyError: 'no such airport'"
    assert b"work.py" in (history["StackTrace"] or b"")
    assert re.search(r'stack\n  Traceback .*\n    File ".*work.py"', site.cli("dlq", "show", f"{source}.dlq").stdout)
    assert process.output.count("Traceback") == 1, "the stack is in the log once"
    assert re.search(r"errors +1 +KeyError", site.cli("dlq", "stats", f"{source}.dlq").stdout)
    assert process.terminate() == 0

    process = function(
        source, code.replace("== 1", "== 7"), valueFormat="json", outputTopic=target, retry={"attempts": 2}
    )
    site.cli("dlq", "redrive", f"{source}.dlq")
    site.wait_committed(f"{source}-work", source, 4)
    assert [record.key for record in site.records(target)] == [b"k0", b"k2", b"k1"]
    assert process.terminate() == 0


def test_the_cluster_lacks_the_topic_until_it_is_made(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """The output topic of a function takes its partitions from the source, as soon as that exists."""
    source = topic() + "-later"
    process = function(
        source, "def handler(context, event):\n    return event.body\n", wait=False, outputTopic=f"{source}-out"
    )
    site.wait_until(lambda: f"topic {source} does not exist" in str(site.reasons(process.url)), "the reason")
    site.cli("topics", "create", source, "--partitions", "3")
    process.wait_ready()
    site.write_json(source, {"n": 1})
    site.wait_until(lambda: len(site.records(f"{source}-out")) == 1, "the output")
    described = json.loads(site.cli("topics", "describe", f"{source}-out", "--output", "json").stdout)
    assert len(described["partitions"]) == 3
    assert "Traceback" not in process.output
