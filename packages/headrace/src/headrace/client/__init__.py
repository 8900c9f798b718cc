"""The client of the HTTP API, and a store of offsets for user code; commands use `exchange.py` alone.

`HeadraceClient` and `AsyncHeadraceClient` need the extra `client`.
"""

from headrace.client.awaiting import AsyncGroupConsumer, AsyncHeadraceClient
from headrace.client.blocking_client import GroupConsumer, HeadraceClient
from headrace.client.exchange import ClientRecord, NewRecord, RetryPolicy
from headrace.client.offset_store import OffsetStore

__all__ = [
    "AsyncGroupConsumer",
    "AsyncHeadraceClient",
    "ClientRecord",
    "GroupConsumer",
    "HeadraceClient",
    "NewRecord",
    "OffsetStore",
    "RetryPolicy",
]
