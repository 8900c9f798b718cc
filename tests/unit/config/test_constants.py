"""Constants that only code sets: to a file each is an unknown key, with its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.load import load_config
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"sql": {"max_rows": 5}}, "sql.max_rows"),
        ({"tables": {"t": {"topic": "t", "max_rows": 5}}}, "tables.t.max_rows"),
        ({"kafka": {"security": {"tls": {"keystore": "a"}}}}, "kafka.security.tls.keystore"),
    ],
)
def test_a_file_that_sets_one_is_refused_with_its_line(tmp_path: Path, settings: Any, path: str) -> None:
    """Once for each key, whatever its value is; a variable is named."""
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as refused:
        load_config(file, {})
    assert re.search(rf"headrace.yaml:[0-9]+: {re.escape(path)}: unknown key: [a-z]", refused.value.description)
    assert path.rpartition(".")[2] not in refused.value.description.rpartition(": ")[2]
    with pytest.raises(ConfigError, match=r"^HEADRACE__SQL__MAX_ROWS: sql\.max_rows: unknown key: known here are"):
        load_config(None, {"HEADRACE__SQL__MAX_ROWS": "5"})
