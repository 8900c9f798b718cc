"""Queries: tables kept from topics, SQL over them, standing queries, and the endpoints of ksqlDB."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="queries",
    section="headrace_queries.query_sections:QuerySections",
    parts="headrace_queries.query_parts:QueryParts",
    endpoints=[
        "headrace_queries.routes:QueryEndpoints",
        "headrace_queries.routes:RowRoute",
        "headrace_queries.ksqldb_routes:KsqldbEndpoints",
    ],
    commands={
        "sql": CliCommand(
            "headrace_queries.sql_command:sql",
            "Run one SELECT of DuckDB's SQL over topics, or over the tables of a running Headrace (--url).",
            "queries",
        ),
        "tables": CliCommand(
            "headrace_queries.sql_tables:tables",
            "Show the tables that a running Headrace keeps from topics, and rebuild one.",
        ),
    },
    tags={"Queries": ["/query", "/close-query", "/tables", "/ksqldb", "/ksql"]},
    topics="headrace_queries.query_parts:required_topics",
    parameters={"key": "Key of the row."},
    checks="headrace_queries.query_checks:QueryChecks",
    needs=["consumers"],
    before=["reactive"],
)
