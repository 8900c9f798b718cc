"""Which tables a SQL text reads."""

from __future__ import annotations

import pytest

from headrace.pipelines.graph import ordered_views, sources_of
from headrace.pipelines.spec import PipelineSpec
from headrace.pipelines.sql import tables_read, without_streaming


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT * FROM a", ["a"]),
        ("select * from A, b as x, `c d` where a.y = 1 and x in (1, 2)", ["a", "b", "c d"]),
        ("SELECT * FROM a JOIN b ON a.x = b.x LEFT JOIN c USING (x)", ["a", "b", "c"]),
        ("SELECT * FROM (SELECT x FROM a) t, b", ["a", "b"]),
        ("WITH t AS (SELECT * FROM a), u (x) AS (SELECT * FROM t) SELECT * FROM u", ["a"]),
        ("SELECT * FROM a WHERE x IN (SELECT x FROM b)", ["a", "b"]),
        ("SELECT (SELECT max(x) FROM a) FROM b UNION ALL SELECT x, y FROM c", ["a", "b", "c"]),
        ("SELECT extract(hour FROM ts), trim(BOTH 'x' FROM y), substring(z FROM 2) FROM a", ["a"]),
        ("SELECT * FROM a WHERE x IS DISTINCT FROM y", ["a"]),
        ("SELECT ' FROM b' AS x, \"join c\" -- FROM d\n/* FROM e */ FROM a", ["a"]),
        ("SELECT * FROM STREAM a WATERMARK ts DELAY OF INTERVAL 5 SECONDS", ["a"]),
        ("SELECT * FROM STREAM(a)", ["a"]),
        ("SELECT k, v FROM a LATERAL VIEW explode(m) AS k, v", ["a"]),
        ("SELECT * FROM a, explode(a.items) AS i(x, y), b", ["a", "b"]),
        ("SELECT * FROM VALUES (1), (2)", []),
        ("SELECT * FROM x.y JOIN json.`/tmp/z`", ["x.y", "json./tmp/z"]),
        ("FROM a |> WHERE x > 1 |> JOIN b USING (x)", ["a", "b"]),
        ("SELECT window.end, count(*) FROM a GROUP BY window(ts, '1 hour'), x", ["a"]),
        ("SELECT * FROM a, a, b", ["a", "b"]),
        ("", []),
        ("SELECT ) FROM", []),
    ],
)
def test_names_after_from_and_join(sql: str, names: list[str]) -> None:
    """Tables are found where SQL names them, and nowhere else."""
    assert tables_read(sql) == names


@pytest.mark.parametrize(
    ("sql", "rest"),
    [
        ("SELECT * FROM STREAM a, STREAM b JOIN stream(c)", "SELECT * FROM a, b JOIN c"),
        ("SELECT n FROM a WATERMARK ts DELAY OF INTERVAL 5 SECONDS GROUP BY n", "SELECT n FROM a  GROUP BY n"),
        ("SELECT n FROM a WATERMARK ts DELAY OF INTERVAL '5 minutes' WHERE x", "SELECT n FROM a  WHERE x"),
        (
            "SELECT 'FROM STREAM x', stream -- FROM STREAM y\nFROM a",
            "SELECT 'FROM STREAM x', stream -- FROM STREAM y\nFROM a",
        ),
    ],
)
def test_a_query_without_its_streaming_clauses(sql: str, rest: str) -> None:
    """Texts, comments and columns of these names stay."""
    assert without_streaming(sql) == rest


def test_a_flow_reads_through_views() -> None:
    """Views come after what they read. The first source of a flow is the one its result topic is made like."""
    spec = PipelineSpec.model_validate(
        {
            "name": "p",
            "sources": {name: {"topic": name, "schema": "x INT"} for name in ("a", "b")},
            "views": {"late": "SELECT * FROM early JOIN b", "early": "SELECT * FROM a"},
            "flows": {"all": {"sql": "SELECT * FROM Late, a", "sink": {"topic": "out"}}},
        }
    )
    assert ordered_views(spec) == ["early", "late"]
    assert sources_of(spec, "all") == ["a", "b"]
