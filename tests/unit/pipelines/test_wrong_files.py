"""The corpus of wrong pipeline files, and what is right though it looks wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.errors import PipelineInvalid
from headrace_pipelines.load import load_pipeline, load_pipelines
from tests.wrong_pipelines import CASES, KNOWN_TO_SPARK, said_of, write_wrong
from yaml_table import table


@pytest.mark.parametrize("name", [name for name in CASES if name not in KNOWN_TO_SPARK])
def test_a_wrong_file_is_refused_with_line_cause_and_remedy(tmp_path: Path, name: str) -> None:
    """Without Spark, and all problems at once."""
    file = write_wrong(tmp_path, name)
    with pytest.raises(PipelineInvalid) as refused:
        load_pipeline(file, check=True)
    found = refused.value.description.replace(f"{tmp_path}/", "").replace(str(tmp_path), "FOLDER").splitlines()
    assert found == [f"{file.name}:{line}" for line in said_of(name)]


@pytest.mark.parametrize(("sql", "mode"), table(__file__, "right"))
def test_sql_that_spark_takes_is_not_refused(
    tmp_path: Path, sql: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Aliases, lambdas, generated columns, structs and static tables are no mistakes."""
    file = tmp_path / "tolls.yaml"
    file.write_text(table(__file__, "file").format(sql=sql, mode=mode))
    with caplog.at_level(logging.WARNING):
        load_pipeline(file, check=True)
    assert caplog.messages == []


def test_two_flows_that_write_one_topic_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may be of one file or of two. It may be what is intended."""
    flow, files = "{sql: SELECT x FROM t, sink: {topic: out}}", [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        text = f"name: {file.stem}\nsources: {{t: {{topic: t, schema: x INT}}}}\nflows:\n  one: {flow}\n"
        file.write_text(text)
    load_pipelines(files)
    files[0].write_text(f"{text}  two: {flow}\n")
    load_pipeline(files[0], check=True)
    assert caplog.messages == [
        f"{files[1]}: pipeline a also writes to topic out; their rows will be mixed",
        f"{files[0]}:5: flows.two.sink: writes to out, as flow one does, so their rows are mixed",
    ]
