"""The lag of our groups, asked often enough for a dashboard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError
from headrace.kafka import Admin
from headrace.lifecycle import Clock, Service
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 5.0


class LagMonitor(Service):
    """Publishes the lag of groups per partition; a question that fails is asked again, and breaks nothing."""

    def __init__(
        self, admin: Admin, groups: Sequence[str], clock: Clock, publish: Callable[[str, TopicPartition, int], None]
    ) -> None:
        super().__init__("lag")
        self._admin = admin
        self._groups = groups
        self._clock = clock
        self._publish = publish

    async def start(self) -> None:
        self.spawn(self._watch(), "watch")

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(_INTERVAL_SECONDS)
            for group in self._groups:
                try:
                    for entry in await self._admin.group_lag(group):
                        self._publish(group, entry.partition, entry.lag)
                except HeadraceError as error:
                    log.debug("lag of %s is not known: %s", group, error.description)
