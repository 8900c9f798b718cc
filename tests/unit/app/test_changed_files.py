"""What a development run watches."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.app.changed_files import ChangedFiles
from headrace.config.whole_file import WholeFile
from headrace_devkit.testing import ManualClock


def test_a_folder_that_is_away_does_not_end_the_run(tmp_path: Path) -> None:
    """A checkout of another branch removes it for a moment; its file counts as changed, and the others stay known."""
    file, pipeline = tmp_path / "headrace.yaml", tmp_path / "totals/totals.yaml"
    pipeline.parent.mkdir()
    for path in (file, pipeline):
        path.touch()
    watched = ChangedFiles(file, WholeFile.model_validate({"pipelines": [pipeline]}), ManualClock())
    assert watched._stamps().keys() == {file, pipeline}
    shutil.rmtree(pipeline.parent)
    assert watched._stamps().keys() == {file}
