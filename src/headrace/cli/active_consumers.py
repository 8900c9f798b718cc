"""`headrace consumers`: the instances of active consumers in one process, over the HTTP API."""

from datetime import datetime
from typing import Any

import click

from headrace.cli.api import Api, api_options
from headrace.cli.output import print_rows
from headrace.sidecar.active.status_routes import ActiveStatusEndpoints


@click.group()
def consumers() -> None:
    """Active consumers: the instances that clients created over HTTP.

    Example: headrace consumers list
    """


@consumers.command("list")
@click.option("--group", help="Only instances of this group.")
@api_options
def list_(group: str | None, api: Api, output: str) -> None:
    """List instances with their topics, their lag, and how long their clients have been idle.

    Example: headrace consumers list --group billing
    """
    found = api.call(ActiveStatusEndpoints.list, None, {"group": group})["consumers"]
    rows = found if output == "json" else [_row(one) for one in found]
    print_rows(rows, output, "no instances of active consumers here")


def _row(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "instance": f"{one['group']}/{one['name']}",
        "principal": one["principal"] or None,
        "topics": one["topics"],
        "partitions": len(one["lags"]),
        "lag": one["lag"],
        "idle": f"{one['idleSeconds']:.0f} s",
        "buffered": f"{one['bufferedBytes'] / 1024:.0f} KiB",
        "last_read": one["lastRead"] and datetime.fromtimestamp(one["lastRead"]).isoformat(" ", "seconds"),
        "reading": one["isReading"],
    }
