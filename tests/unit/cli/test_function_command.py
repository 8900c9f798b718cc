"""`headrace function validate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main

FILE = """\
spec:
  handler: main:handler
  maxReplicas: 4
  triggers:
    orders:
      kind: kafka
      numWorkers: 2
      attributes: {topics: [t], consumerGroup: g}
"""


def headrace(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "function.yaml").write_text(FILE)
    (tmp_path / "main.py").write_text("def handler(context, event): ...\n")
    return tmp_path


def test_a_usable_file_is_ok_with_warnings_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """The advice needs no Kafka when the number of partitions is given."""
    assert headrace("function", "validate", "--partitions", "16") == 0
    out, err = capsys.readouterr()
    assert out == "function.yaml: ok (main:handler, triggers: orders)\n"
    assert "function.yaml:3: spec.maxReplicas: is checked and not used yet" in err
    assert "advice: orders: numWorkers is 2: 16 partitions over 4 replicas advise 5" in err


def test_strict_takes_warnings_for_problems(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 78, as for any other problem; advice is none."""
    assert headrace("function", "validate", "--strict", "--partitions", "16", "--output", "json") == 78
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["problems"]), len(found["advice"])) == (False, 1, 1)


def test_a_handler_with_a_typo_is_a_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found without running the module."""
    (folder / "main.py").write_text("raise SystemExit(5)\ndef handle(context, event): ...\n")
    assert headrace("function", "validate", "--partitions", "2") == 78
    assert "function.yaml:2: spec.handler: names function handler, which" in (err := capsys.readouterr().err)
    assert "did you mean main:handle?" in err


def test_without_kafka_the_rest_of_the_advice_is_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broker that does not answer keeps no file from being checked."""
    (folder / "function.yaml").write_text(FILE.replace("{topics", "{heartbeatInterval: 5s, topics"))
    assert headrace("function", "validate", "-b", "127.0.0.1:1") == 0
    err = capsys.readouterr().err
    assert "advice: orders: heartbeatInterval is 5s: write 3.33s or less" in err
    assert "workers and replicas are not compared with partitions" in err
