"""`headrace tables`: the tables that a running Headrace keeps from topics, over the HTTP API."""

from typing import Any

import click

from headrace.cli.api import Api, api_options
from headrace.cli.global_options import HeadraceGroup
from headrace.cli.output import print_result, print_rows
from headrace_queries.routes import QueryEndpoints


@click.group(cls=HeadraceGroup, aliases={"list": "show"})
def tables() -> None:
    """Show the tables that a running Headrace keeps from topics, and rebuild one.

    Example: headrace tables show
    """


@tables.command()
@click.argument("name", required=False)
@api_options
def show(name: str | None, api: Api, output: str) -> None:
    """Show every table with its topic, rows, size and lag, and why one is not live.

    Of one table it also shows the columns, and the records that it has left out.

    Example: headrace tables show stock
    """
    if name is None:
        tables = api.call(QueryEndpoints.tables)["tables"]
        rows = tables if output == "json" else [_row(table) for table in tables]
        print_rows(rows, output, "no tables here: name some in headrace.yaml (tables)")
        return
    found = api.call(QueryEndpoints.table, name=name)
    lines = {**_row(found), "age of newest record": f"{found['age_seconds']:.1f} s"}
    lines |= {"left out": found["corrupt"], "last left out": found["last_corrupt"], "removed unread": found["gap"]}
    text = "\n".join(f"{key:20}  {value}" for key, value in lines.items() if value not in ("", None))
    width = max((len(column) for column, _ in found["columns"]), default=0)
    columns = "\n".join(f"  {column:{width}}  {kind}" for column, kind in found["columns"])
    print_result(found, f"{text}\ncolumns\n{columns}", output)


@tables.command()
@click.argument("name")
@api_options
def rebuild(name: str, api: Api, output: str) -> None:
    """Delete the rows of a table and read its topic again. Until it is live, a SELECT sees a part of the rows.

    Example: headrace tables rebuild stock
    """
    api.call(QueryEndpoints.rebuild, name=name)
    result = {"table": name, "rebuilding": True}
    print_result(result, f"table {name} is being built again: see headrace tables show {name}", output)


def _row(table: dict[str, Any]) -> dict[str, Any]:
    return {
        "table": table["name"],
        "kind": table["kind"],
        "topic": table["topic"],
        "rows": table["rows"],
        "size": f"{table['bytes'] / (1 << 20):.1f} MiB",
        "lag": table["lag"],
        "state": f"{table['state']}: {table['reason']}" if table["reason"] else table["state"],
    }
