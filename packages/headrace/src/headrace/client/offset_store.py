"""Offsets in the same database as the results, so that one transaction writes both.

For backends and handlers that write to SQLite or PostgreSQL through a DB-API connection. Needs Headrace's order
`partition` with one record per delivery: then one offset per partition covers all completed records.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import Fenced

_CREATE = """CREATE TABLE IF NOT EXISTS {table} (
    consumer_group VARCHAR(255) NOT NULL, topic VARCHAR(249) NOT NULL, topic_partition INTEGER NOT NULL,
    next_offset BIGINT, epoch BIGINT NOT NULL, PRIMARY KEY (consumer_group, topic, topic_partition))"""
_TAKE = """INSERT INTO {table} AS known (consumer_group, topic, topic_partition, next_offset, epoch)
    VALUES (?, ?, ?, NULL, ?) ON CONFLICT (consumer_group, topic, topic_partition)
    DO UPDATE SET epoch = excluded.epoch WHERE known.epoch < excluded.epoch"""
_ADVANCE = """INSERT INTO {table} AS known (consumer_group, topic, topic_partition, next_offset, epoch)
    VALUES (?, ?, ?, ?, ?) ON CONFLICT (consumer_group, topic, topic_partition)
    DO UPDATE SET next_offset = excluded.next_offset, epoch = excluded.epoch WHERE known.epoch <= excluded.epoch
    AND (known.next_offset IS NULL OR known.next_offset < excluded.next_offset)"""
_READ = """SELECT next_offset, epoch FROM {table}
    WHERE consumer_group = ? AND topic = ? AND topic_partition = ?"""


class OffsetStore:
    """A table of next offsets and assignment epochs, by group, topic and partition.

    It commits nothing: the caller's transaction contains these writes and the results.
    """

    def __init__(self, connection: Any, table: str = "headrace_offsets", mark: str = "?") -> None:
        """Prepare; no statement is executed.

        Args:
            connection: A DB-API connection that is not in autocommit mode.
            table: Name of the table; trusted text.
            mark: The driver's placeholder of a parameter: `?` (sqlite3) or `%s` (psycopg).
        """
        self._connection = connection
        self._create, self._take, self._advance, self._read = (
            text.format(table=table).replace("?", mark) for text in (_CREATE, _TAKE, _ADVANCE, _READ)
        )

    def create(self) -> None:
        """Create the table if it does not exist."""
        self._run(self._create)

    def take(self, group: str, topic: str, partition: int, epoch: int) -> int | None:
        """Start an assignment: from now on assignments with smaller epochs write nothing.

        Returns:
            The offset of the next record to deliver; None if no record is completed yet.

        Raises:
            Fenced: A later assignment has started already.
        """
        self._run(self._take, group, topic, partition, epoch)
        next_offset, newest = self._run(self._read, group, topic, partition).fetchone()
        if newest > epoch:
            raise self._fenced(topic, partition, epoch, newest)
        return None if next_offset is None else int(next_offset)

    def advance(self, group: str, topic: str, partition: int, offset: int, epoch: int | None = None) -> bool:
        """Store that a record is completed. Return False if it already was, so that its results exist.

        A delivery without an epoch, such as one of a replay, belongs to no assignment. Once an assignment has started,
        such a delivery writes nothing, and its records count as completed.

        Raises:
            Fenced: A later assignment has started; respond with 503, and this one ends by itself.
        """
        if self._run(self._advance, group, topic, partition, offset + 1, epoch or 0).rowcount == 1:
            return True
        next_offset, newest = self._run(self._read, group, topic, partition).fetchone()
        if newest > (epoch or 0) and (epoch or next_offset is None or offset >= next_offset):
            raise self._fenced(topic, partition, epoch, newest)
        return False

    def _run(self, text: str, *values: Any) -> Any:
        cursor = self._connection.cursor()
        cursor.execute(text, values)
        return cursor

    @staticmethod
    def _fenced(topic: str, partition: int, epoch: int | None, newest: int) -> Fenced:
        assignment = f"assignment {epoch} has ended" if epoch else "the delivery belongs to no assignment"
        return Fenced(
            f"{topic}-{partition}: {assignment}, and {newest} has started; nothing was written",
            topic=topic,
            partition=partition,
        )
