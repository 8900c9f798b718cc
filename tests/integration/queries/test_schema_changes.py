"""A table whose schema in the registry changes while it is kept."""

from __future__ import annotations

import json
from typing import Any

from headrace_devkit.testing import MakeTopic, Registry, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.table_process import TableProcess

AVRO = '{"type":"record","name":"S","fields":[{"name":"item","type":"string"}%s]}'
SIZE = ',{"name":"size","type":"long","default":0}'


def test_a_new_schema_while_the_table_runs(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, schema_registry: Registry
) -> None:
    """Added columns have values from the first record on; a removed one is NULL, and refused at the next start."""
    name = topic()
    tables = {table: {"topic": name, "value_format": "avro", "kind": table} for table in ("log", "latest")}
    config = {**site.config, "schema_registry": {"url": schema_registry.url}, "tables": tables}
    made = TableProcess(headrace(config, wait=False))  # it is not ready before there is a schema
    site.wait_until(lambda: made.send("GET", "/live").status == 200, "the server")

    def write(schema: str, *values: Any) -> None:
        records = [{"key": value["item"], "value": value} for value in values]
        body = {"keyFormat": "string", "valueFormat": "avro", "valueSchema": schema, "records": records}
        written = made.send("POST", f"/producers/{name}", json.dumps(body).encode())
        assert written.status == 200, written

    write(AVRO % "", {"item": "a"})
    for table in tables:
        made.wait_for(f"SELECT item FROM {table}", [["a"]])
    write(AVRO % SIZE, {"item": "b", "size": 2})
    write(AVRO % "", {"item": "c"})  # by a producer that has the schema of before
    write(AVRO % SIZE, {"item": "d", "size": 4})
    rows = [["a", None], ["b", 2], ["c", None], ["d", 4]]
    for table in tables:
        made.wait_for(f"SELECT item, size FROM {table} ORDER BY 1", rows)
        assert made.table(table)["corrupt"] == 0
    write(AVRO % "", {"item": "e"})  # known already
    write(AVRO % ',{"name":"more","type":"string","default":""}', {"item": "f", "more": "x"})
    made.wait_for("SELECT item, size FROM log WHERE item > 'd' ORDER BY 1", [["e", None], ["f", None]])
    says = "table log keeps its columns until the next start: column size is not in the schema any more"
    site.wait_until(lambda: says in made.process.output, says)
    made.process.terminate()
    made.process.start()
    assert made.wait_state("log", "refused")["reason"].startswith("column size is not in the schema any more")
