"""Flows with handlers and formats in pipeline files: their settings, and how their mistakes are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.errors import PipelineInvalid
from headrace.functions import protocol
from headrace_pipelines.graph import topics_written
from headrace_pipelines.handler_setup import setup_of
from headrace_pipelines.load import load_pipeline
from headrace_pipelines.spec import PipelineSpec
from yaml_table import table

ROOT = Path(__file__).parents[3]
GOOD = table(__file__, "good")


def load(folder: Path, text: str) -> PipelineSpec:
    (folder / "plates.py").write_text("def handler(context, event):\n    return event.body\n")
    if not (folder / "function").exists():
        shutil.copytree(ROOT / "examples" / "function", folder / "function")
    (folder / "p.yaml").write_text(text)
    return load_pipeline(folder / "p.yaml", check=True)


def test_a_handler_gets_the_format_of_its_source_and_a_function_yaml_keeps_its_own(tmp_path: Path) -> None:
    """The sink's topic is the output topic of both; the batch size and the variables of a function.yaml count."""
    spec = load(tmp_path, GOOD.replace("schema:", "value_format: avro, schema:"))
    trigger = protocol.TriggerSetup("kafka-cluster", "f", "binary", "avro", "json", "out")
    assert setup_of(spec, "f") == protocol.Setup("plates:handler", str(tmp_path), "0", [trigger], "default", "info", {})
    assert topics_written(spec) == {"out": "passages", "out.dlq": "passages"}
    assert spec.uses_registry
    spec = load(tmp_path, GOOD.replace("plates:handler", "function/function.yaml"))
    found = setup_of(spec, "f")
    assert (found.handler, found.folder) == ("main:handler", str(tmp_path / "function"))
    assert found.triggers == [protocol.TriggerSetup("kafka-cluster", "flights", "binary", "json", "json", "out")]
    assert found.env["NUCLIO_FUNCTION_NAME"] == "how-late"
    spec = load(tmp_path, GOOD.replace("sink:", "on_error: drop\n    dead_letter_topic: bad\n    sink:"))
    assert topics_written(spec) == {"out": "passages"}


@pytest.mark.parametrize(("old", "new", "expected"), table(__file__, "mistakes_are_named"))
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """Each has the line and the path in the file."""
    with pytest.raises(PipelineInvalid) as raised:
        load(tmp_path, GOOD.replace(old, new))
    assert expected in raised.value.description


def test_explicit_acknowledgement_is_refused(tmp_path: Path) -> None:
    """A micro-batch ends its records."""
    load(tmp_path, GOOD)
    file = tmp_path / "function" / "function.yaml"
    text = file.read_text().replace("numWorkers: 2", "explicitAckMode: enable")
    file.write_text(text.replace("initialOffset: earliest", "workerAllocationMode: static"))
    with pytest.raises(PipelineInvalid, match="has explicitAckMode: remove it, because a pipeline completes records"):
        load(tmp_path, GOOD.replace("plates:handler", "function/function.yaml"))
