"""Tables and standing queries that `headrace config check` refuses: the line, the place, and what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.main import root
from headrace.errors import ConfigError
from yaml_table import table

FILES = {
    "tables": "tables:\n  stock: {}\n",
    "queries": f"{table(__file__, 'stock')}queries:\n  low: {{}}\n",
    "files": "{}",
}
CASES = [(file.replace("{}", text), says) for name, file in FILES.items() for text, says in table(__file__, name)]


@pytest.mark.parametrize(("text", "says"), CASES, ids=range(len(CASES)))
def test_a_wrong_definition_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    """One sentence each, which people can act on."""
    file = tmp_path / "headrace.yaml"
    file.write_text(text)
    done = CliRunner().invoke(root, ["config", "check", "-c", str(file)])
    assert isinstance(done.exception, ConfigError), done.output
    pattern = ".*".join(map(re.escape, says.split("...")))
    said = done.exception.description.replace(f"{tmp_path}/", "")
    assert re.fullmatch(f"headrace.yaml:{pattern}", said, re.DOTALL), said
