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
from headrace.pipelines.load import load_pipeline

BAD = [
    "^.*",
    "^",
    "^orders",
    "a b",
    "../x",
    "a\r\nb",
    "a\n",
    "a\x00b",
    "x" * 250,
    ".",
    "..",
    "",
    "ord\u0435rs",
    "a,b",
    "a/b",
]
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


PLACES: dict[str, tuple[Callable[[Path], Any], Callable[[str], dict[str, Any]]]] = {
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
    read, make = PLACES[place]
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(make(name)))
    read(path)


@pytest.mark.parametrize("place", PLACES)
def test_no_file_takes_a_name_that_is_none(tmp_path: Path, place: str) -> None:
    """The file is refused, so no client is ever asked."""
    for name in BAD:
        if name or not place.startswith("function "):  # Nuclio's way to say that nothing was written
            with pytest.raises(HeadraceError):
                load(tmp_path, place, name)


@pytest.mark.parametrize("place", PLACES)
def test_every_file_takes_what_kafka_takes(tmp_path: Path, place: str) -> None:
    """Odd names are names; requests take them too."""
    assert [check_topic(name) for name in GOOD] == GOOD
    for name in GOOD[: -1 if "dead letter" in place else None]:
        load(tmp_path, place, name)


@pytest.mark.parametrize("name", ["", "^g", " g", "g ", "a\x00b", "a\tb", "x" * 256])
def test_no_group_has_a_name_that_is_none(name: str) -> None:
    """Patterns, control characters and over-long names are refused; other printable names are taken."""
    with pytest.raises(InvalidRequest):
        check_group(name)
    assert [check_group(good) for good in ("billing", "team a/billing:1", "g^")] == [
        "billing",
        "team a/billing:1",
        "g^",
    ]


@pytest.mark.parametrize("words", ["topics create", "topics describe", "produce", "consume"])
@pytest.mark.parametrize("name", [name for name in BAD if "\x00" not in name])
def test_no_command_takes_a_name_that_is_none(words: str, name: str) -> None:
    """It says so before it asks a broker; there is none here."""
    done = CliRunner().invoke(root, [*words.split(), "--bootstrap-servers", "127.0.0.1:1", "--", name], input="x\n")
    assert done.exit_code != 0
    assert "not a valid topic name" in done.output + str(done.exception)
