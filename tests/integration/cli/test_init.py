"""`headrace init`: what it writes is valid and runs, on a Kafka of its own; it overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from headrace.cli.file_schemas import schema_of
from headrace_devkit.init_command import KINDS
from tests.command_line import headrace


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != "all")) for kind in KINDS])
def test_a_project_is_valid(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files pass the checks and their schemas, which refuse a wrong key; a second time it is refused, by name."""
    monkeypatch.chdir(tmp_path)
    assert headrace("init", kind, "shop") == 0
    assert re.search(r"cd shop\n  headrace run --dev.*\n  printf .*\n  headrace ", capsys.readouterr().out)
    monkeypatch.chdir("shop")
    assert headrace("config", "check") == 0, capsys.readouterr().err
    for path in Path().rglob("*.yaml"):
        if mark := re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text()):
            schema = json.loads((path.parent / mark[1]).read_text())
            assert schema == schema_of("config" if path.stem == "headrace" else (path.parent / mark[1]).stem)
            jsonschema.Draft202012Validator.check_schema(schema)
            validator = jsonschema.Draft202012Validator(schema)
            file = yaml.safe_load(path.read_text())
            assert [*validator.iter_errors(file)] == []
            wrong = {"spec": {"triggers": {"t": {"disabled": "x"}}}} if "spec" in file else {**file, "kafak": 1}
            assert [*validator.iter_errors(wrong)]
    for path in Path().rglob("*.*"):
        path.unlink() if path.name not in ("README.md", "shop") and path.is_file() else None
    assert headrace("init", kind) == 2
    assert "README.md: already there" in capsys.readouterr().err
    assert [path.name for path in Path().rglob("*") if path.is_file()] == ["README.md"]


@pytest.mark.parametrize("words", [["--ignore=tests/test_pipeline.py"], pytest.param([], marks=pytest.mark.long)])
def test_the_tests_of_a_project_pass(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pytest as its README says, also those of all kinds in one folder."""
    monkeypatch.chdir(tmp_path)
    assert headrace("init", "all") == 0
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout
    assert f"{5 - len(words)} passed" in done.stdout
