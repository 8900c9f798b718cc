"""How much one produce request may hold: records, and levels of nesting. Source: reliability.md 4.1, row H5."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from headrace import errors

MAX_DEPTH: Final = 64
_SHALLOW_BYTES: Final = 2 * MAX_DEPTH + 1
"""Shorter texts cannot be too deep."""
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_STEPS: Final = bytes(1 if byte in b"[{" else 255 if byte in b"]}" else 0 for byte in range(256))
_NO_STEPS: Final = bytes(byte for byte in range(256) if not _STEPS[byte])


def check_count(records: Sequence[object], max_records: int) -> None:
    """Return if a request's records are few enough.

    Raises:
        TooManyRecords: They are not.
    """
    if len(records) > max_records:
        raise errors.TooManyRecords(
            f"{len(records)} records, and {max_records} may come at once (http.max_records): send several requests",
            limit_records=max_records,
        )


def check_depth(texts: Sequence[bytes | None], first: int = 0) -> None:
    """Return if keys or values, JSON that was checked before, are flat enough; `first` is the number of the first.

    Raises:
        InvalidRequest: They are not; the error names the record.
    """
    given = [*filter(None, texts)]
    # This runs for every request, so brackets inside of strings count at first. They can also hide a nesting; that
    # harms nobody, because whatever reads the text has a limit of its own.
    if len(max(given, key=len, default=b"")) < _SHALLOW_BYTES or _depth(b"".join(given)) <= MAX_DEPTH:
        return
    for index, text in enumerate(texts, first):
        if text and _depth(_STRING.sub(b"", text)) > MAX_DEPTH:
            raise errors.InvalidRequest(
                f"record {index} is nested deeper than {MAX_DEPTH} levels: nothing was sent", index=index
            )


def _depth(text: bytes) -> int:
    return max(accumulate(array("b", text.translate(_STEPS, _NO_STEPS))), default=0)
