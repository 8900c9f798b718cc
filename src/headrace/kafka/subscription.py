"""Which topics a consumer reads while it runs: patterns resolved to names again and again, and topics watched for a
deletion after which another one has their name.

The client is only ever given names: it would take one that begins with `^` for a pattern of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.kafka.admin import Admin
from headrace.lifecycle import Clock, Readiness, Service

log = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class Subscriber(Protocol):
    """A consumer, as the subscription sees it."""

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics from now on."""

    def created_anew(self, topic: str, after: float) -> None:
        """Take note that a topic was created anew; assignments from `after` on (seconds, epoch) know it already."""


class Subscription(Service):
    """Looks at the cluster's topics every few seconds, for one consumer.

    A topic that is gone is dropped when two looks in a row do not see it: a broker that has just started may know no
    topics yet.
    """

    def __init__(
        self,
        name: str,
        consumer: Subscriber,
        admin: Admin,
        clock: Clock,
        *,
        topics: Sequence[str],
        fits: Callable[[str], bool] | None,
    ) -> None:
        """Prepare.

        Args:
            name: Name of the service.
            consumer: Takes the topics; it reads `topics` already.
            admin: The door to its cluster.
            clock: For the pauses.
            topics: Topics that are read in any case.
            fits: Whether another topic is to be read as well; None for no other one. Never asked about Kafka's own.
        """
        super().__init__(name)
        self._consumer = consumer
        self._admin = admin
        self._clock = clock
        self._topics = topics
        self._fits = fits
        self._subscribed: Collection[str] = topics
        self._last_found: set[str] = set()
        self._ids: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}
        self._problem = "" if fits is None else "the cluster's topics are not known yet"

    async def start(self) -> None:
        self.spawn(self._watch(), "watch")

    def readiness(self) -> Readiness:
        return Readiness(not self._problem, self._problem)

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except HeadraceError as error:
                log.debug("%s: %s", self.name, error.description)
            else:
                self._problem = ""
            await self._clock.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        if self._fits is not None:
            found = {topic.name for topic in await self._admin.list_topics() if self._fits(topic.name)}
            wanted = [*self._topics, *sorted((found | self._last_found) - set(self._topics))]
            self._last_found = found
            if wanted != self._subscribed:
                log.info("%s: reads %s", self.name, ", ".join(wanted) or "nothing: no topic fits")
                self._consumer.subscribe(wanted)
                self._subscribed = wanted
        now = self._clock.time()
        ids = await self._admin.topic_ids(self._subscribed)
        for topic, topic_id in ids.items():
            if self._ids.get(topic, topic_id) != topic_id:
                self._consumer.created_anew(topic, self._missing_since.get(topic, now))
            self._ids[topic] = topic_id
        self._missing_since = {t: self._missing_since.get(t, now) for t in self._ids if t not in ids}
