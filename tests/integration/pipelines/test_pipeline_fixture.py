"""The public fixture for tests of pipelines, as their authors use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from yaml_table import table

from headrace.errors import PipelineInvalid

pytestmark = pytest.mark.heavy

FILE = table(__file__, "file")


def test_rows_of_a_pipeline_for_given_rows(pipeline_rows: Any, tmp_path: Path) -> None:
    """Python views, rules and static tables are as in a run; a changed Python file counts at the next call."""
    file = tmp_path / "tolls.yaml"
    file.write_text(FILE)
    code = tmp_path / "tolls_code.py"
    code.write_text("def heavy(passages):\n    return passages.where('cents >= 500')\n")
    (tmp_path / "owners.csv").write_text("plate,owner\nB 1,Ann\nB 2,unknown\nB 3,Bob\n")
    (tmp_path / "given.csv").write_text("plate,gate,cents\nB 1,north,700\nB 2,north,800\nB 3,south,100\n")
    assert pipeline_rows(file, "by_owner", {"passages": "given.csv"}) == [{"owner": "Ann", "cents": 700}]
    code.write_text("def heavy(passages):\n    return passages.where('cents < 500')\n# longer than before\n")
    assert pipeline_rows(file, "by_owner", {"passages": "given.csv"}) == [{"owner": "Bob", "cents": 100}]
    given = {"passages": [{"plate": "B 1", "cents": 400}], "owners": [{"plate": "B 1", "owner": "Carl"}]}
    assert pipeline_rows(file, "by_owner", given) == [{"owner": "Carl", "cents": 400}]
    steps = {"passages": [[{"gate": "north"}], [{"gate": "north"}]]}
    streamed = pipeline_rows(file, "by_gate", steps, streaming=True)
    assert streamed == [{"gate": "north", "n": 1}, {"gate": "north", "n": 2}]
    with pytest.raises(PipelineInvalid, match=r"given\.passages has the column plte"):
        pipeline_rows(file, "by_gate", {"passages": [{"plte": "B 1"}]})
