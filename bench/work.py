"""The handler that pipelines and bare PySpark call."""

from __future__ import annotations

from typing import Any

import msgspec

_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode


def add_tax(context: Any, event: Any) -> bytes:
    """Return the order of an event with its price before taxes."""
    order = _decode(event.body)
    order["net"] = order["amount"] / 1.2
    return _encode(order)
