"""Which tables a SQL text reads."""

from __future__ import annotations

import pytest

from headrace_pipelines.graph import ordered_views, sources_of
from headrace_pipelines.spec import PipelineSpec
from headrace_pipelines.sql import tables_read
from tests.pipeline_harness import document
from yaml_table import table


@pytest.mark.parametrize(("sql", "names"), table(__file__, "names_after_from_and_join"))
def test_names_after_from_and_join(sql: str, names: list[str]) -> None:
    """Tables are found where SQL names them, and nowhere else."""
    assert tables_read(sql) == names


def test_a_flow_reads_through_views() -> None:
    """Views come after what they read. The first source of a flow is the one its result topic is made like."""
    sources = {name: {"topic": name, "schema": "x INT"} for name in ("a", "b")}
    views = {"late": "SELECT * FROM early JOIN b", "early": "SELECT * FROM a"}
    flows = {"all": {"sql": "SELECT * FROM Late, a", "sink": {"topic": "out"}}}
    spec = PipelineSpec.model_validate({**document(sources=sources, views=views), "flows": flows})
    assert ordered_views(spec) == ["early", "late"]
    assert sources_of(spec, "all") == ["a", "b"]
