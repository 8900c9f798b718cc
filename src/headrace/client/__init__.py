"""Helpers for user code that works with Headrace; the product never imports it."""

from headrace.client.offset_store import OffsetStore

__all__ = ["OffsetStore"]
