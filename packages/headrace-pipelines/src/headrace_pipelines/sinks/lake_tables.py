"""What tables of a lake have in common: types that every later batch may have too, and how errors are raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pyarrow
from pyarrow import types

from headrace.errors import HeadraceError, PipelineInvalid, SinkUnavailable


@contextlib.contextmanager
def errors_of(
    where: str, described: Callable[[Exception], str], is_away: Callable[[Exception], bool], settings: str
) -> Iterator[None]:
    """Raise errors of a library as errors of the sink.

    Args:
        where: What its text begins with.
        described: Returns the text and the type of an error, without secrets and values of rows.
        is_away: Whether a later try may succeed, because the table or its store cannot be reached now.
        settings: The setting of the sink that may be wrong.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as cause:  # noqa: BLE001 boundary: libraries raise errors of their clients, and plain ones
        text = f"{where}: {described(cause)}"
        if is_away(cause):
            raise SinkUnavailable(text) from None
        raise PipelineInvalid(f"{text}: correct the flow's SQL, {settings}, or the table") from None


def stored(field: pyarrow.Field) -> pyarrow.Field:
    """Return a column as tables have it: instants in UTC, and null is allowed at each level."""
    return pyarrow.field(field.name, _stored_type(field.type))


def _stored_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    if types.is_timestamp(kind):
        return pyarrow.timestamp("us", kind.tz and "UTC")
    if types.is_list(kind):
        return pyarrow.list_(pyarrow.field("element", _stored_type(kind.value_type)))
    if types.is_struct(kind):
        return pyarrow.struct([stored(field) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_stored_type(kind.key_type), _stored_type(kind.item_type))
    return kind
