"""Sinks that write each micro-batch exactly once: the target stores the number of the next one with its rows.

Spark repeats a micro-batch that failed or was cut by a crash, with the same number and the same rows. With a
transaction per task, each task has a number as well; that of the micro-batch follows when all tasks have theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame

from headrace.errors import HeadraceError, PipelineInvalid
from headrace_pipelines.driver.batch_decision import decide

_RETRY_SECONDS = 60.0
_PAUSE_SECONDS = 1.0
_QUERY_ID = "sql.streaming.queryId"
REAL_TIME: Final = "real-time"
"""The digest while real-time mode writes, whose micro-batches have other rows when they are repeated."""


class ExactlyOnceSink:
    """Writes the micro-batches of one flow, for `foreachBatch`, to a target.

    `open` of a target ends the transaction that a predecessor left open, and returns the number of the next batch, or
    None. `digest` is then that of the last batch. `write` writes an Arrow table, the next number and a digest together.
    `poll` does what is due between batches, on another thread.
    """

    def __init__(
        self,
        flow: str,
        make: Callable[[str], Any],
        checkpoint: Path,
        *,
        accepts: bool,
        expires: bool = False,
        read: Callable[[DataFrame, int], Any] = lambda batch, number: batch.toArrow(),
    ) -> None:
        """Prepare.

        Args:
            flow: Name of the flow.
            make: Makes the target for the id of the query, which is new with each checkpoint.
            checkpoint: Folder of the flow's checkpoint.
            accepts: Whether a batch in doubt is written, perhaps a second time.
            expires: Whether the target forgets its number in time; another one without a number has lost its rows.
            read: Returns the rows of a batch for the target.
        """
        self._flow = flow
        self._make = make
        self._accepts = accepts
        self._expires = expires
        self._read = read
        self._offsets = checkpoint / "offsets"
        planned = (int(file.name) for file in self._offsets.glob("*") if file.name.isdigit())
        self._tried = max(planned, default=-1)
        """The last batch that may have been written."""
        self._target: Any = None
        self._next: int | None = None
        """The number of the next batch, as the target has it."""
        self._is_open = False
        self.failure: HeadraceError | None = None
        """Why the last batch failed."""

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch, unless the target has it."""
        digest = self._digest(number)
        rows: Any = None
        end = 0.0
        while True:
            try:
                if self._is_needed(batch, number, digest):
                    rows = self._read(batch, number) if rows is None else rows
                    self._write(number, rows, digest)
                return
            except HeadraceError as cause:
                self._is_open = False
                now = time.monotonic()
                end = end or now + _RETRY_SECONDS  # counts from the first failure: the write itself may take longer
                if not cause.retriable or now > end:
                    self.failure = cause
                    raise
                print(f"flow {self._flow}: {cause.description}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(_PAUSE_SECONDS)

    def poll(self, completed: int) -> None:
        """Do what the target needs between batches."""
        if self._target:
            self._target.poll()

    def _is_needed(self, batch: DataFrame, number: int, digest: str) -> bool:
        """Return whether the target does not have a batch yet.

        Raises:
            PipelineInvalid: Its number does not follow the target's, so rows would be repeated or missing.
        """
        if self._target is None:
            self._target = self._make(query_of(batch))
        if not self._is_open:
            self._next, self._is_open = self._target.open(), True
        known = self._next
        changed = self._target.digest not in ("", digest)
        is_new = known is None and (number == 0 or (self._expires and number > self._tried))
        decision = decide(number, known, changed=changed, may_lag=is_new, accepts=self._accepts)
        if self._target.digest == REAL_TIME and not self._accepts:
            decision = "unknown"
        if decision == "ahead":
            assert known is not None
            has = f"batch {number} with other records" if known == number + 1 else known - 1
            raise PipelineInvalid(
                f"the checkpoint continues with batch {number}, but the sink has {has}: the checkpoint is "
                "an old copy. Restore the newest one, or give the flow another name to begin again"
            )
        if decision == "unknown":
            last = "it has none" if known is None else f"its last is {known - 1}"
            raise PipelineInvalid(
                f"the sink does not know whether it has batch {number}: {last}. Its record of batches has expired or "
                "was removed, or the sink was not exactly-once before. To write the batch, perhaps a second "
                "time, set sink.accept_unknown_batch: true for the next start"
            )
        return decision == "write"

    def _digest(self, number: int) -> str:
        """Return a digest of where a batch ends in its sources: if Spark lost its plan, it plans another end."""
        with contextlib.suppress(OSError):
            ends = (self._offsets / str(number)).read_text().splitlines()[2:]
            files = [text for source, end in enumerate(ends) for text in self._files(source, end)]
            return hashlib.sha256("\n".join([*ends, *files]).encode()).hexdigest()[:16]
        return ""

    def _files(self, source: int, end: str) -> list[str]:
        """Return the files of a batch of a file source, whose end is a number, whatever files it stands for."""
        number = end.removeprefix('{"logOffset":').removesuffix("}")
        logs = (self._offsets.parent / "sources" / str(source)).glob(f"{number}*") if number.isdigit() else []
        return [log.read_text() for log in logs if log.name in (number, f"{number}.compact")]

    def _write(self, number: int, rows: Any, digest: str) -> None:
        try:
            self._target.write(number, rows, digest)
        except HeadraceError:
            if self._next is not None:
                self._tried = number
            raise
        self._next = number + 1


def query_of(batch: DataFrame) -> str:
    """Return the id of the query that a micro-batch belongs to; it is new with each checkpoint."""
    return str(batch.sparkSession.sparkContext.getLocalProperty(_QUERY_ID))
