"""Makes the progress of flows visible as committed offsets of a group, for every tool that shows lag.

They are never read back: a flow goes on from its checkpoint.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from headrace.errors import HeadraceError
from headrace.lifecycle import Clock
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

PublishOffsets = Callable[[str, Mapping[TopicPartition, int]], Awaitable[None]]
"""Sets the committed offsets of a group: group, partition to the next offset to read."""

_INTERVAL_SECONDS = 1.0


class OffsetPublisher:
    """Publishes the newest positions of each group at most once a second."""

    def __init__(self, publish: PublishOffsets, clock: Clock) -> None:
        self._publish = publish
        self._clock = clock
        self._pending: dict[str, dict[TopicPartition, int]] = {}
        self._failing = False

    def note(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Take new positions of a group: topic to partition to the next offset to read."""
        pending = self._pending.setdefault(group, {})
        for topic, partitions in positions.items():
            for partition, offset in partitions.items():
                pending[TopicPartition(topic, partition)] = offset

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            await self._clock.sleep(_INTERVAL_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Publish what is new. A failure is logged once; what was not published stays and is tried again."""
        for group, pending in list(self._pending.items()):
            sent = dict(pending)
            if not sent:
                continue
            try:
                await self._publish(group, sent)
            except HeadraceError as cause:
                if not self._failing:
                    log.warning("offsets of group %s are not published, so its lag is stale: %s", group, cause)
                self._failing = True
                return
            self._failing = False
            # Only what was sent: newer positions may have come, and a drain may publish at the same time.
            for where, offset in sent.items():
                if pending.get(where) == offset:
                    del pending[where]
