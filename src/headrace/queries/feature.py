"""Queries: tables kept from topics, SQL over them, standing queries, and the endpoints of ksqlDB."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="queries",
    parts="headrace.queries.query_parts:QueryParts",
    endpoints=["headrace.queries.routes:QueryEndpoints", "headrace.queries.ksqldb_routes:KsqldbEndpoints"],
    commands={
        "sql": CliCommand(
            "headrace.cli.sql_command:sql",
            "Run one SELECT of DuckDB's SQL over topics, or over the tables of a running Headrace (--url).",
            "queries",
        ),
        "tables": CliCommand(
            "headrace.cli.sql_tables:tables",
            "Show the tables that a running Headrace keeps from topics, and rebuild one.",
        ),
    },
    tags={"Queries": ["/query", "/close-query", "/tables", "/ksqldb", "/ksql"]},
    topics="headrace.queries.query_parts:required_topics",
    parameters={"key": "Key of the row."},
    checks="headrace.queries.query_checks:QueryChecks",
    needs=["consumers"],
    before=["reactive"],
)
