"""Files with given and expected rows, and how differing rows are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import PipelineInvalid
from headrace_pipelines.test_cases import differences, load_test_case, steps_of
from yaml_table import table


def test_rows_come_from_the_file_or_from_files_it_names(tmp_path: Path) -> None:
    """Cells of a CSV file are numbers where they look like them, and null where they are empty."""
    (tmp_path / "a.csv").write_text("plate,cents,at\nB 1,700,2026-01-01T00:00:00Z\n007,,\n")
    (tmp_path / "b.json").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "c.json").write_text('[{"x": 3}]')
    (tmp_path / "one.yaml").write_text(table(__file__, "one"))
    task = load_test_case(tmp_path / "one.yaml").task(tmp_path)
    assert task.given["passages"] == [
        [{"plate": "B 1", "cents": 700, "at": "2026-01-01T00:00:00Z"}, {"plate": "007", "cents": None, "at": None}]
    ]
    assert task.given["others"] == [[{"x": 0}], [{"x": 1}, {"x": 2}], []]
    assert task.expect == {"flow": [{"at": "2026-01-01T00:00:00Z"}], "view": [{"x": 3}]}
    assert task.streaming


@pytest.mark.parametrize(("text", "sentence"), table(__file__, "a_wrong_file_is_named_with_its_line"))
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    """As any other file of Headrace."""
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(PipelineInvalid) as refused:
        load_test_case(tmp_path / "one.yaml")
    assert sentence in str(refused.value)


def test_a_file_of_rows_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The sentence has its path."""
    (tmp_path / "bad.json").write_text("{x: 1}")
    (tmp_path / "one.yaml").write_text("expect: {a: bad.json}\n")
    with pytest.raises(PipelineInvalid, match=f"{tmp_path}/bad.json: "):
        load_test_case(tmp_path / "one.yaml").task(tmp_path)


def test_a_file_of_rows_is_never_cut(tmp_path: Path) -> None:
    """Rows that are left out silently would make a wrong test right."""
    (tmp_path / "rows.csv").write_text("id,pad\n" + f"1,{'x' * 1000}\n" * 2000)
    with pytest.raises(PipelineInvalid, match=r"rows.csv: is larger than 1048576 bytes: give fewer rows"):
        steps_of("rows.csv", tmp_path)


def test_rows_are_compared_without_their_order_unless_it_counts() -> None:
    """A differing row is shown with the place of the difference."""
    assert differences(["b", "a"], ["a", "b"]) == []
    assert differences(["b", "a"], ["a", "b"], ordered=True) != []
    found = differences(['{"n":1}', '{"n":2}'], ['{"n":1}', '{"n":3}'])
    assert found[0] == '  {"n":1}'
    assert '- {"n":3}' in found
    assert '+ {"n":2}' in found
    assert differences([], ["a"]) == ["- a"]
