"""When a client that nothing uses any more ends."""

from __future__ import annotations

import gc
import weakref

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin


def test_an_administrative_client_ends_with_its_last_reference() -> None:
    """Not at a later collection: until then its connections would keep credentials that have changed."""
    gc.disable()
    try:
        admin = Admin(KafkaConfig(bootstrap_servers="127.0.0.1:1"))
        client = weakref.ref(admin)
        del admin
        assert client() is None
    finally:
        gc.enable()
