"""`headrace function validate`, and what `run` refuses before it starts."""

import json
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize(
    ("code", "handler", "problem"), yaml.safe_load(Path(__file__).with_name("handlers.yaml").read_text())
)
@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_handler_that_cannot_be_called_has_its_line_and_the_fix(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, code: str, handler: str, problem: str
) -> None:
    """The exit code is 78, and nothing of the module has run."""
    (folder / "function.yaml").write_text(FILE.replace("main:handler", handler))
    (folder / "main.py").write_text(code + "\nopen('ran', 'w')\n")
    assert headrace("function", command) == 78
    assert problem in capsys.readouterr().err
    assert not (folder / "ran").exists()
