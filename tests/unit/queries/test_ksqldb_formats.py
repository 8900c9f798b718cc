"""The formats of ksqlDB's HTTP API, and the fields of light-4j's endpoint."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import Draining, HeadraceError, InvalidRequest
from headrace_queries.ksqldb import (
    KsqlColumn,
    QueryBody,
    QueryStreamBody,
    column_type,
    query_renderer,
    query_stream_renderer,
    result_columns,
    starts_at_earliest,
)
from headrace_queries.ksqldb_active import ActiveQuery, objects, refused
from headrace_queries.statement_text import read_statement
from yaml_table import table

COLUMNS = [KsqlColumn("ID", "BIGINT"), KsqlColumn("a`b", "ARRAY<STRING>")]


@pytest.mark.parametrize(("form", "push", "complete", "broken"), table(__file__, "responses"))
def test_a_response_is_ksqldbs_byte_for_byte(form: str, push: bool, complete: str, broken: str) -> None:
    """The rows of a push query may be sent one by one; each is a complete line at once."""
    for end in (complete, broken):
        renderer = query_renderer(push=push) if form == "query" else query_stream_renderer(form, push=push)
        sent = renderer.header("q1", COLUMNS)
        sent += renderer.rows([b'[1,["x"]]']) + renderer.rows([]) + renderer.rows([b"[2,null]"])
        sent += renderer.end(limit_reached=True) if end is complete else renderer.error(Draining("stopping"))
        assert sent.decode() == end


@pytest.mark.parametrize(("name", "kind"), table(__file__, "types"))
def test_types_have_ksqldbs_names(name: str, kind: str) -> None:
    """Nested ones too, whatever the names of their fields."""
    assert column_type(name) == kind


def test_names_of_columns_are_in_upper_case_unless_quoted() -> None:
    """Clients of ksqlDB look columns up by these names."""
    statement = read_statement("SELECT id, name AS `fullName` FROM t", ksqldb=True)
    found = result_columns([("id", "BIGINT"), ("fullName", "VARCHAR")], statement)
    assert found == [KsqlColumn("ID", "BIGINT"), KsqlColumn("fullName", "STRING")]


def test_unknown_fields_of_ksqldbs_requests_are_ignored() -> None:
    """Its clients send more than a query needs."""
    body = b'{"ksql":"SELECT 1;","streamsProperties":{"ksql.streams.auto.offset.reset":"earliest"},"x":1}'
    query = msgspec.json.decode(body, type=QueryBody)
    assert starts_at_earliest(query.streamsProperties)
    stream = msgspec.json.decode(b'{"sql":"SELECT 1","requestProperties":{}}', type=QueryStreamBody)
    assert not starts_at_earliest(stream.properties)


@pytest.mark.parametrize(("body", "sql", "properties"), table(__file__, "active_requests"))
def test_the_fields_of_light_4j_are_a_statement_and_properties(
    body: dict[str, Any], sql: str, properties: dict[str, Any]
) -> None:
    """The fields have priority over `properties`."""
    query = msgspec.convert(body, ActiveQuery)
    assert (query.statement().sql, query.query_properties()) == (sql, properties)


@pytest.mark.parametrize(("body", "problem"), table(__file__, "active_refused"))
def test_an_error_of_light_4js_endpoint_has_its_code(body: dict[str, Any], problem: str) -> None:
    """Whatever the cause, it is the same code with the cause in the description."""
    with pytest.raises(HeadraceError) as raised:
        msgspec.convert(body, ActiveQuery).statement()
    error = refused(raised.value)
    assert (error.code, error.status) == ("ERR30002", 400)
    assert error.description.startswith(problem)
    other = refused(InvalidRequest("no", topic="t"))
    assert (other.description, other.parameters) == ("Ksql execution error: no", {"topic": "t"})


def test_rows_of_light_4js_endpoint_are_objects() -> None:
    """Values stay as they are: a decimal keeps its scale."""
    rows = [b'[1, "a"]', b'[ 2.50,{"x":[null]}]']
    assert objects(COLUMNS, rows) == b'[{"ID":1,"a`b":"a"},{"ID":2.50,"a`b":{"x":[null]}}]'
    assert objects(COLUMNS, []) == b"[]"
