"""Takes a batch apart that fails as a whole: what fails alone is to blame, whatever the error, and nothing else is."""

from collections.abc import Callable
from typing import Final, TypeVar

import duckdb

from headrace.errors import QueriesUnavailable

T = TypeVar("T")

_OF_ENGINE: Final = (
    duckdb.FatalException,
    duckdb.InternalException,
    duckdb.IOException,
    duckdb.ConnectionException,
    duckdb.TransactionException,
    duckdb.InterruptException,
    QueriesUnavailable,
    OSError,
    MemoryError,
)
"""These say how the engine is. Any other error may be of a record, which only the record alone can show."""


def in_parts(
    run: Callable[[int, int], T], count: int, *, until_failure: bool = False
) -> tuple[list[T], dict[int, Exception]]:
    """Run a call over a batch, and over its halves where that fails.

    Args:
        run: Takes the index of the first record, and that behind the last.
        count: Records of the batch.
        until_failure: Whether to leave out what is behind the first record that fails alone.

    Returns:
        The results of the parts in their order, and the errors of records that fail alone, by index.

    Raises:
        Exception: It says how the engine is, or the call fails without any record.
    """
    try:
        return [run(0, count)], {}
    except Exception as cause:  # boundary: taken apart, and each record has the error that it causes
        if isinstance(cause, _OF_ENGINE):
            raise
        run(0, 0)
        return _halved(run, 0, count, cause, until_failure)


def _halved(
    run: Callable[[int, int], T], start: int, end: int, cause: Exception, until_failure: bool
) -> tuple[list[T], dict[int, Exception]]:
    if end - start == 1:
        return [], {start: cause}
    results: list[T] = []
    failed: dict[int, Exception] = {}
    middle = (start + end) // 2
    for part in (start, middle), (middle, end):
        if failed and until_failure:
            break
        try:
            results.append(run(*part))
        except Exception as why:  # boundary: likewise
            if isinstance(why, _OF_ENGINE):
                raise
            inner, of_records = _halved(run, *part, why, until_failure)
            results += inner
            failed |= of_records
    return results, failed
