"""What a table needs of the topic that it is kept from."""

from headrace.consumers.preconditions import Finding, Topic, hours, judged
from headrace_queries.table_config import TableConfig


def judge_table(reader: str, table: TableConfig, topic: Topic) -> Finding:
    """Judge whether a table that is built again from its topic has every row that it had before."""
    name, kept = topic.info.name, topic.retention_ms
    needed_ms = table.retention_seconds and 1000 * table.retention_seconds
    lacks = table.kind == "latest" and kept >= 0 and (needed_ms is None or needed_ms > kept)
    return judged(
        reader,
        f"retention of {name}",
        "warning" if lacks else "ok",
        hours(kept),
        f"headrace topics alter {name} --set cleanup.policy=compact: Kafka deletes the newest record of "
        "a key, too, so the row of such a key is missing after a rebuild",
    )
