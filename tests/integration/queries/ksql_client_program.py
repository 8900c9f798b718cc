"""Calls Headrace with the `ksql` client, and prints what it gives as JSON in the last line."""

import collections
import collections.abc
import json
import sys

for name in [name for name in dir(collections.abc) if name[0].isupper()]:
    if not hasattr(collections, name):  # its HTTP library is older than Python 3.10
        setattr(collections, name, getattr(collections.abc, name))

from ksql import KSQLAPI  # noqa: E402
from ksql.errors import KSQLError  # noqa: E402

EARLIEST = {"auto.offset.reset": "earliest"}
client = KSQLAPI(sys.argv[1], check_version=False)


def objects(statement: str, **options: object) -> list[object]:
    return list(client.query(statement, return_objects=True, **options))


def closed() -> list[object]:
    """Close a query by the id in its first line; return whether that worked, and its last line."""
    lines = client.query("SELECT item FROM stock EMIT CHANGES")
    query_id = json.loads(next(lines).strip().removeprefix("[").removesuffix(","))["header"]["queryId"]
    worked = client.close_query(query_id)
    return [worked, json.loads(next(lines).strip().removesuffix("]"))["finalMessage"]]


def error() -> list[object]:
    try:
        objects("SELECT count(*) FROM stock EMIT CHANGES")
    except KSQLError as refused:
        return [refused.error_code, refused.msg]
    return []


found = {
    "pull": objects("SELECT item, n, CAST(price AS DOUBLE) AS price FROM stock ORDER BY n"),
    "push": objects("SELECT item FROM stock EMIT CHANGES LIMIT 2", stream_properties=EARLIEST),
    "idle": objects("SELECT item FROM stock EMIT CHANGES", idle_timeout=1),
    "closed": closed(),
    "closed_again": client.close_query("other"),
    "error": error(),
}
print(json.dumps(found))
