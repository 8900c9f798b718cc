"""`headrace pipeline status`, `pause`, and `state --discard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.api import Api
from headrace.http.endpoint import Endpoint
from headrace_pipelines.checkpoints import locked
from headrace_pipelines.pipeline_command import pipeline
from tests.command_line import headrace

FLOW = {"state": "running", "batchId": 3, "inputRecords": 40, "recordsPerSecond": 5.0, "lagRecords": None}
STATUS = {"name": "tolls", "reason": "flow f has made no progress", "flows": {"f": FLOW}}
FILE = "name: tolls\nsources: {a: {topic: a, schema: x INT}}\nflows: {f: {sql: SELECT * FROM a, sink: {topic: b}}}\n"


@pytest.mark.parametrize("words", [("status",), ("status", "tolls"), ("pause", "tolls"), ("resume", "tolls")])
def test_the_status_is_a_table(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per flow, `-` for an unknown number, and the reason below."""
    called: list[str] = []

    def call(api: Api, endpoint: Endpoint, **names: str) -> dict[str, Any]:
        called.append(f"{endpoint.method} {endpoint.url(**names)}")
        one = {**STATUS, "flows": {"f": FLOW | {"stateRows": 2, "watermark": None}}}
        return {"pipelines": [one]} if endpoint.id == "listPipelines" else one

    monkeypatch.setattr(Api, "call", call)
    assert headrace("pipeline", *words, "--url", "http://localhost:1") == 0
    shown = capsys.readouterr().out
    assert "tolls.f  running  3      40       5.0         -    2           -" in shown
    assert "tolls: flow f has made no progress" in shown
    path = "/adm/pipelines" + "".join(f"/{word}" for word in words[1:])
    assert called == [f"GET {path}" if words[0] == "status" else f"POST {path}/{words[0]}"]


def test_a_checkpoint_is_discarded_after_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--yes` it asks; it refuses an unknown flow, a folder without the checkpoint, and one in use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tolls.yaml").write_text(FILE)
    words = ("state", "tolls.yaml", "--discard")
    assert headrace("pipeline", *words, "g") == 1
    assert "has no flow g: there are f" in capsys.readouterr().err
    assert headrace("pipeline", *words, "f") == 1
    assert "has no checkpoint of flow f" in capsys.readouterr().err
    folder = tmp_path / ".headrace/state/pipelines/tolls"
    (folder / "checkpoints/f").mkdir(parents=True)
    asked = CliRunner().invoke(pipeline, [*words, "f"], input="n\n")
    assert (asked.exit_code, "Discard?" in asked.output) == (1, True)
    assert (folder / "checkpoints/f").exists()
    with locked(folder):
        assert headrace("pipeline", *words, "f", "--yes") == 78
    assert "stop the pipeline first" in capsys.readouterr().err
    assert headrace("pipeline", *words, "f", "--yes") == 0
    assert not (folder / "checkpoints/f").exists()
