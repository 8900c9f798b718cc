"""Functions in a running process and in the foreground: the example unchanged, and a topic that comes later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file

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
