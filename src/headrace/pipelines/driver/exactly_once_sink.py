"""Sinks that take each micro-batch exactly once, because the target keeps the number of the next one with its rows.

Spark gives a micro-batch that failed or was cut by a crash again, with the same number and the same rows. Its tasks may
write it in transactions of their own: each then has a number, too, and that of the micro-batch follows when all have.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from headrace.errors import HeadraceError, PipelineInvalid
from headrace.pipelines.driver.batch_decision import decide
from headrace.pipelines.protocol import DriverPlan
from headrace.pipelines.sinks import KafkaSink, PostgresSink

_RETRY_SECONDS = 60.0
_PAUSE_SECONDS = 1.0
_QUERY_ID = "sql.streaming.queryId"


class ExactlyOnceSink:
    """Writes the micro-batches of one flow, for `foreachBatch`, to a target.

    `open` of a target ends what a predecessor left open and returns the number of the next batch, or None; `digest` is
    then what the last batch was written with. `write` writes an Arrow table, the next number and a digest together.
    `poll` does what is due between batches, on another thread.
    """

    def __init__(
        self,
        flow: str,
        make: Callable[[str], Any],
        checkpoint: Path,
        *,
        accepts: bool,
        read: Callable[[DataFrame, int], Any] = lambda batch, number: batch.toArrow(),
    ) -> None:
        """Prepare.

        Args:
            flow: Name of the flow.
            make: Makes the target for the id of the query, which is new with each checkpoint.
            checkpoint: Folder of the flow's checkpoint.
            accepts: Whether a batch is written although it is not known whether it was written before.
            read: Returns the rows of a batch that the target writes.
        """
        self._flow, self._make, self._accepts, self._read = flow, make, accepts, read
        self._offsets = checkpoint / "offsets"
        planned = (int(file.name) for file in self._offsets.glob("*") if file.name.isdigit())
        self._tried = max(planned, default=-1)
        """The last batch that may have been written."""
        self._target: Any = None
        self._next: int | None = None
        """The next batch by the target."""
        self._is_open = False
        self.failure: HeadraceError | None = None
        """Why the last batch failed."""

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch, unless the target has it."""
        rows, end = None, 0.0
        while True:
            try:
                if self._is_needed(batch, number):
                    rows = self._read(batch, number) if rows is None else rows
                    self._write(number, rows)
                return
            except HeadraceError as cause:
                self._is_open = False
                now = time.monotonic()
                end = end or now + _RETRY_SECONDS  # from the first failure, before which more may have passed
                if not cause.retriable or now > end:
                    self.failure = cause
                    raise
                print(f"flow {self._flow}: {cause.description}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(_PAUSE_SECONDS)

    def poll(self) -> None:
        """Do what the target needs between batches."""
        if self._target:
            self._target.poll()

    def _is_needed(self, batch: DataFrame, number: int) -> bool:
        """Return whether the target does not have a batch yet.

        Raises:
            PipelineInvalid: Its number does not follow the target's, so rows would be repeated or missing.
        """
        if self._target is None:
            self._target = self._make(_query(batch))
        if not self._is_open:
            self._next, self._is_open = self._target.open(), True
        known = self._next
        changed = self._target.digest not in ("", self._digest(number))
        is_new = known is None and not 0 < number <= self._tried
        decision = decide(number, known, changed=changed, may_lag=is_new, accepts=self._accepts)
        if decision == "ahead":
            assert known is not None
            has = f"batch {number} with other records" if known == number + 1 else known - 1
            raise PipelineInvalid(
                f"the checkpoint continues with batch {number}, and the sink has {has}: the checkpoint is "
                "an old copy. Restore the newest one, or give the flow another name to begin again"
            )
        if decision == "unknown":
            last = "it has none" if known is None else f"its last is {known - 1}"
            raise PipelineInvalid(
                f"the sink does not know whether it has batch {number}: {last}. Its record of batches has expired or "
                "was removed, or the sink was not exactly-once before. To write the batch once more, perhaps a second "
                "time, set sink.accept_unknown_batch: true for the next start"
            )
        return decision == "write"

    def _digest(self, number: int) -> str:
        """Return a digest of where a batch ends in its sources: Spark plans one that it has lost with another end."""
        with contextlib.suppress(OSError):
            ends = (self._offsets / str(number)).read_text().splitlines()[2:]
            return hashlib.sha256("\n".join(ends).encode()).hexdigest()[:16]
        return ""

    def _write(self, number: int, rows: Any) -> None:
        try:
            self._target.write(number, rows, self._digest(number))
        except HeadraceError:
            if self._next is not None:
                self._tried = number
            raise
        self._next = number + 1


def exactly_once(plan: DriverPlan, name: str) -> ExactlyOnceSink | None:
    """Return what writes the micro-batches of a flow in this process; None if its sink is not exactly-once."""
    sink, prefix = plan.spec.running[name].sink, plan.spec.group(name)
    if not isinstance(sink, PostgresSink) and not (isinstance(sink, KafkaSink) and sink.delivery == "exactly_once"):
        return None

    def make(query: str) -> Any:
        if isinstance(sink, PostgresSink):
            from headrace.pipelines.driver.postgres import PostgresBatches  # here, because it needs a further library

            return PostgresBatches(sink, f"{prefix}.{query}")
        from headrace.kafka.transactions.batch_transactions import (
            BatchTransactions,  # only drivers with such a sink load the client
        )

        assert plan.kafka
        return BatchTransactions(plan.kafka, f"{prefix}.{query}", sink.transaction_timeout_seconds)

    accepts, checkpoint = sink.accept_unknown_batch, plan.checkpoint(name)
    if not isinstance(sink, KafkaSink) or sink.scope == "batch":
        return ExactlyOnceSink(name, make, checkpoint, accepts=accepts)
    from headrace.pipelines.driver.task_sink import TaskWriter  # here, because most pipelines need none

    limit, tasks = sink.transaction_timeout_seconds, plan.spec.driver.shuffle_partitions

    def in_tasks(batch: DataFrame, number: int) -> Any:
        write = TaskWriter(f"{prefix}.{_query(batch)}", number, limit, plan.secrets, accepts)
        return write.all_of(batch, tasks)

    return ExactlyOnceSink(name, make, checkpoint, accepts=accepts, read=in_tasks)


def _query(batch: DataFrame) -> str:
    return str(batch.sparkSession.sparkContext.getLocalProperty(_QUERY_ID))
