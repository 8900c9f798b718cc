"""`headrace function validate`; `test_wrong_functions.py` has what it refuses."""

import json
from pathlib import Path

import pytest

from tests.command_line import headrace
from yaml_table import table

FILE = table(__file__, "file")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "function.yaml").write_text(FILE)
    (tmp_path / "main.py").write_text("def handler(context, event): ...\n")
    return tmp_path


def test_strict_takes_warnings_for_problems(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 78, as for any other problem."""
    assert headrace("function", "validate", "--strict", "--output", "json") == 78
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["problems"])) == (False, 1)
