"""A lease between two looks at its assignment."""

from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin, Lease
from headrace.runtime import Deadline
from headrace_devkit.testing import ManualClock


async def test_a_lease_that_was_lost_before_it_is_known_to_be_held_is_not_held() -> None:
    """It was assigned and revoked between two looks, so another process may have it."""
    consumer: Any = None
    lease = Lease(KafkaConfig(), Admin(KafkaConfig()), "work", ManualClock())
    lease._assigned.set()
    await lease.on_revoked([], Deadline(ManualClock(), 0))
    assert not await lease._wait_assigned(consumer)
