"""The corpus of wrong pipeline files, and what is right though it looks wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.errors import PipelineInvalid
from headrace.pipelines.load import load_pipeline, load_pipelines
from tests.wrong_pipelines import CASES, KNOWN_TO_SPARK, said_of, write_wrong


def test_the_corpus_has_many_causes() -> None:
    """Fifty files with twenty-five causes; a cause is a sentence without names."""
    causes = {" ".join(line.split(": ", 2)[-1].split()[:3]) for name in CASES for line in said_of(name)}
    assert len(CASES) >= 50
    assert len(causes) >= 25


@pytest.mark.parametrize("name", [name for name in CASES if name not in KNOWN_TO_SPARK])
def test_a_wrong_file_is_refused_with_line_cause_and_remedy(tmp_path: Path, name: str) -> None:
    """Without Spark, and all problems at once."""
    file = write_wrong(tmp_path, name)
    with pytest.raises(PipelineInvalid) as refused:
        load_pipeline(file, check=True)
    found = refused.value.description.replace(f"{tmp_path}/", "").splitlines()
    assert found == [f"{file.name}:{line}" for line in said_of(name)]


@pytest.mark.parametrize("name", sorted(KNOWN_TO_SPARK))
def test_a_file_that_only_spark_can_refuse_loads(tmp_path: Path, name: str) -> None:
    """A check that is not certain refuses nothing."""
    load_pipeline(write_wrong(tmp_path, name), check=True)


RIGHT = [
    ("SELECT a.gate, b.owner FROM passages AS a JOIN plates AS b ON a.plate = b.plate", "append"),
    ("SELECT * FROM passages LIMIT 3", "append"),
    ("SELECT gate, count(*) AS n FROM passages GROUP BY gate ORDER BY n LIMIT 3", "complete"),
    ("SELECT DISTINCT plate FROM passages", "update"),
    ("SELECT window.start AS s, count(*) AS n FROM passages GROUP BY window(at, '1 minute')", "update"),
    (
        "SELECT window(at, '1 minute') AS w, count(*) AS n FROM STREAM passages WATERMARK at DELAY OF INTERVAL 1 MINUTE"
        " GROUP BY 1",
        "append",
    ),
    ("SELECT w.start, n FROM (SELECT window(at, '1 minute') AS w, count(*) AS n FROM passages GROUP BY 1)", "update"),
    ("SELECT cents / 100 AS euros, euros * 2 AS twice FROM passages", "append"),
    ("SELECT transform(array(cents), x -> x + 1) AS more FROM passages", "append"),
    ("SELECT plate, item FROM passages LATERAL VIEW explode(split(gate, ',')) t AS item", "append"),
    ("SELECT explode(split(gate, ',')) FROM passages", "append"),
    ("SELECT key, value FROM passages_corrupt", "append"),
    ("WITH big AS (SELECT gate, cents AS c FROM passages) SELECT big.c FROM big WHERE c > 3", "append"),
    ("SELECT PLATE, Gate FROM Passages WHERE CENTS > 3", "append"),
    ("SELECT p.* EXCEPT (cents) FROM passages AS p", "append"),
    ("FROM passages |> WHERE cents > 3 |> SELECT plate", "append"),
    ("SELECT struct(plate, cents).cents AS c, named_struct('x', 1).x AS x FROM passages", "append"),
    ("SELECT gate, count(*) AS n FROM passages GROUP BY gate HAVING n > 3", "update"),
    ("SELECT max_by(plate, at) AS newest, approx_count_distinct(plate) AS n FROM passages", "update"),
    (
        "SELECT session_window.end AS e, count(*) AS n FROM passages GROUP BY session_window(at, '5 minutes')",
        "complete",
    ),
    ("SELECT a.plate FROM passages AS a JOIN (SELECT plate AS q FROM plates) AS b ON a.plate = b.q", "append"),
    (
        "SELECT p.plate, o.r FROM passages AS p JOIN "
        "(SELECT row_number() OVER (ORDER BY owner) AS r, plate FROM owners) AS o ON p.plate = o.plate",
        "append",
    ),
    ("SELECT p.plate, o.owner FROM passages AS p LEFT JOIN owners AS o ON p.plate = o.plate", "append"),
]


@pytest.mark.parametrize(("sql", "mode"), RIGHT)
def test_sql_that_spark_takes_is_not_refused(
    tmp_path: Path, sql: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Aliases, lambdas, generated columns, structs and static tables are no mistakes."""
    file = tmp_path / "tolls.yaml"
    file.write_text(
        "name: tolls\n"
        "sources:\n"
        '  passages: {topic: passages, schema: "plate STRING, gate STRING, cents INT, at TIMESTAMP"}\n'
        '  plates: {topic: plates, schema: "plate STRING, owner STRING, since TIMESTAMP"}\n'
        '  owners: {table: owners.csv, schema: "plate STRING, owner STRING"}\n'
        f"flows:\n  one:\n    sql: >-\n      {sql}\n    sink: {{topic: out, mode: {mode}}}\n"
    )
    with caplog.at_level(logging.WARNING):
        load_pipeline(file, check=True)
    assert caplog.messages == []


def test_two_flows_that_write_one_topic_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be what is intended."""
    file = tmp_path / "p.yaml"
    flow = "{sql: SELECT x FROM a, sink: {topic: out}}"
    file.write_text(f"name: p\nsources: {{a: {{topic: a, schema: x INT}}}}\nflows:\n  one: {flow}\n  two: {flow}\n")
    load_pipeline(file, check=True)
    assert caplog.messages == [f"{file}:5: flows.two.sink: writes to out, as flow one does, which mixes rows"]


def test_two_pipelines_that_write_one_topic_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As two flows of one file are."""
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        flows = "{f: {sql: SELECT x FROM t, sink: {topic: out}}}"
        file.write_text(f"name: {file.stem}\nsources: {{t: {{topic: t, schema: x INT}}}}\nflows: {flows}\n")
    load_pipelines(files)
    assert caplog.messages == [f"{files[1]}: writes to topic out, as pipeline a does, which mixes rows"]


def test_references_in_options_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a secret need not stand in the file."""
    monkeypatch.setenv("STORE", "s3cret")
    file = tmp_path / "p.yaml"
    options = "{kafka.ssl.keystore.password: '${env:STORE}', failOnDataLoss: false}"
    file.write_text(
        f"name: p\nsources: {{a: {{topic: a, schema: x INT, options: {options}}}}}\n"
        "flows: {f: {sql: SELECT x FROM a, sink: {topic: b}}}\n"
    )
    found = load_pipeline(file, check=True).sources["a"].options
    assert found == {"kafka.ssl.keystore.password": "s3cret", "failOnDataLoss": False}
