"""Row S1: a name that Kafka's client would take for something else is refused wherever one can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from headrace.cli.main import root
from headrace.config.load import load_config
from headrace.errors import HeadraceError, InvalidRequest
from headrace.functions.load import load_function
from headrace.kafka.names import check_group, check_topic
from headrace_pipelines.load import load_pipeline

BAD = ["^.*", "^", "^orders", "a b", "../x", "a\r\nb", "a\n", "a\x00b", "x" * 250, ".", "..", ""]
BAD += ["ord\u0435rs", "a,b", "a/b"]
GOOD = ["...", ".a", "a.", "a..b", "_x", "-", "x" * 249]


def reactive(**settings: Any) -> dict[str, Any]:
    consumer = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost:1"}, **settings}
    return {"reactive_consumers": {"c": consumer}}


def function(**attributes: Any) -> dict[str, Any]:
    attributes = {"topics": ["t"], "consumerGroup": "g", **attributes}
    return {"spec": {"handler": "m:h", "triggers": {"k": {"kind": "kafka-cluster", "attributes": attributes}}}}


def pipeline(source: str = "s", sink: str = "s2") -> dict[str, Any]:
    flow = {"sql": "SELECT * FROM a", "sink": {"topic": sink}}
    return {"name": "p", "sources": {"a": {"topic": source, "schema": "x INT"}}, "flows": {"f": flow}}


def load_main(path: Path) -> Any:
    return load_config(path, {})


FILES: dict[str, tuple[Callable[[Path], Any], Callable[[str], dict[str, Any]]]] = {
    "reactive topics": (load_main, lambda name: reactive(topics=["fine", name])),
    "dead letter topic": (load_main, lambda name: reactive(dead_letter={"topic": name})),
    "audit topic": (load_main, lambda name: {"audit": {"to": "topic", "topic": name}}),
    "idempotency topic": (load_main, lambda name: {"producer": {"idempotency": {"topic": name}}}),
    "function topics": (load_function, lambda name: function(topics=["fine", name])),
    "function output": (load_function, lambda name: function(outputTopic=name)),
    "function dead letters": (load_function, lambda name: function(deadLetterTopic=name)),
    "pipeline source": (load_pipeline, lambda name: pipeline(source=name)),
    "pipeline sink": (load_pipeline, lambda name: pipeline(sink=name)),
}


def load(tmp_path: Path, place: str, name: str) -> None:
    read, make = FILES[place]
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(make(name)))
    read(path)


@pytest.mark.parametrize("place", FILES)
def test_files_take_valid_names_only(tmp_path: Path, place: str) -> None:
    """A wrong name ends the start, so it never reaches a client. Odd names are valid; requests take them too."""
    for name in BAD:
        if name or not place.startswith("function "):  # Nuclio's way to leave it out
            with pytest.raises(HeadraceError):
                load(tmp_path, place, name)
    assert [check_topic(name) for name in GOOD] == GOOD
    for name in GOOD[: -1 if "dead letter" in place else None]:
        load(tmp_path, place, name)


@pytest.mark.parametrize("words", ["topics create", "topics describe", "produce", "consume"])
def test_no_command_takes_a_wrong_name(words: str) -> None:
    """It reports it before it calls a broker; there is none here."""
    for name in ("^orders", "a\r\nb", "")[words == "consume" :]:  # which takes patterns
        command = [*words.split(), "--bootstrap-servers", "127.0.0.1:1", "--", name]
        done = CliRunner().invoke(root, command, input="x\n")
        assert done.exit_code != 0
        assert "not a valid topic name" in done.output + str(done.exception)


@pytest.mark.parametrize("words", ["create", "alter --partitions 2", "delete --yes"])
def test_no_command_changes_an_internal_topic(words: str) -> None:
    """As `POST /topics` rejects it, before a broker is called; there is none here."""
    for name in ("_headrace-control", "__consumer_offsets", "_schemas", "orders.retry.10s"):
        done = CliRunner().invoke(root, ["topics", *words.split(), "-b", "127.0.0.1:1", name])
        assert "is internal" in done.output + str(done.exception)


@pytest.mark.parametrize("name", ["", "^g", " g", "g ", "a\x00b", "a\tb", "x" * 256])
def test_a_wrong_group_name_is_refused(name: str) -> None:
    """Patterns, control characters and over-long names are refused; other printable names are taken."""
    with pytest.raises(InvalidRequest):
        check_group(name)
    assert [check_group(good) for good in ("billing", "team a/billing:1", "g^")] == [
        "billing",
        "team a/billing:1",
        "g^",
    ]
