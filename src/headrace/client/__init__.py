"""For people's own code beside Headrace; the product never imports it."""

from headrace.client.offset_store import OffsetStore

__all__ = ["OffsetStore"]
