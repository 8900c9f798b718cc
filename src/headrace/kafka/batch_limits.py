"""How large a batch of each topic may be: Kafka refuses a whole batch that is larger than its topic allows.

The client fills batches up to one size for all topics, and never splits a batch that was refused.
Source: the topic's `max.message.bytes` and `segment.bytes`, which hold for a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final

import confluent_kafka

from headrace.errors import BatchRefused, HeadraceError, KafkaUnavailable
from headrace.kafka.admin import Admin
from headrace.records import Header

log = logging.getLogger(__name__)

_FRAME_BYTES: Final = 256
"""Left free for what frames a batch and its first record."""
_HEADER_BYTES: Final = 10
_LIMIT_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 10.0
_REFUSED_SECONDS: Final = 600.0
"""For so long the limit stays below a batch that was refused, whatever the topic's settings say."""
_SETTINGS: Final = ("max.message.bytes", "segment.bytes")
_TOO_LARGE: Final = (confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE, confluent_kafka.KafkaError.RECORD_LIST_TOO_LARGE)


class BatchLimits:
    """Knows the limits of the topics that were asked for. `of` and `refusal` may be called on any thread."""

    def __init__(self, admin: Callable[[], Admin], usual_bytes: int) -> None:
        """Prepare; `admin` is called before the first question, `usual_bytes` is the size of batches without limit."""
        self._admin = admin
        self._usual_bytes = usual_bytes
        self._fresh_until: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._bytes: dict[str, int] = {}
        self._refused: dict[str, tuple[int, float]] = {}
        """For each topic the size of batches after the last refusal, and until when it is the most."""

    def of(self, topic: str) -> int | None:
        """Return how many bytes a batch may have, a power of two; None if the usual size fits."""
        return self._bytes.get(topic)

    def knows(self, topic: str) -> bool:
        """Return whether `learn` would ask nothing."""
        return self._fresh_until.get(topic, 0.0) > time.monotonic()

    async def learn(self, topic: str) -> None:
        """Ask for a topic's limit, unless it is known. Where Kafka does not tell it, the usual size stays."""
        async with self._locks.setdefault(topic, asyncio.Lock()):
            if self.knows(topic):
                return
            try:
                configs = await asyncio.wait_for(self._admin().topic_configs(topic), _LIMIT_SECONDS)
                most = min(float(configs.get(name, math.inf)) for name in _SETTINGS) - _FRAME_BYTES
                size, until = self._refused.get(topic, (0, 0.0))
                refused = until > time.monotonic()
                self._set(topic, min(most, size) if refused else most)
                self._fresh_until[topic] = until if refused else math.inf
            except (KafkaUnavailable, TimeoutError):
                self._fresh_until[topic] = time.monotonic() + _AGAIN_SECONDS
            except HeadraceError as error:  # for want of a right: a batch that is refused tells as well
                log.debug("the batch limit of topic %s is not known: %s", topic, error)
                self._fresh_until[topic] = math.inf

    def learn_from_thread(self, topic: str, loop: asyncio.AbstractEventLoop) -> None:
        """Do the same from a thread that may wait for the loop."""
        if not self.knows(topic):
            with contextlib.suppress(TimeoutError, RuntimeError):  # the loop may have ended
                asyncio.run_coroutine_threadsafe(self.learn(topic), loop).result(2 * _LIMIT_SECONDS)

    def refusal(
        self, error: confluent_kafka.KafkaError, record: confluent_kafka.Message, batch_bytes: int
    ) -> BatchRefused | None:
        """Return the error for a record that is not too large itself, but its batch was; else None.

        The topic's limit is lowered then, and stays so for a while: it is not known, was lowered in Kafka, or has
        another cause. `batch_bytes` is the size of the batches it was sent with; a larger record is alone in its batch.
        """
        if error.code() not in _TOO_LARGE:
            return None
        topic, headers = str(record.topic()), record.headers()
        if wire_bytes(record.key(), record.value(), headers) > batch_bytes:  # type: ignore[arg-type]
            return None
        size = self._set(topic, min(self._bytes.get(topic, batch_bytes), batch_bytes - 1))
        self._refused[topic] = size, time.monotonic() + _REFUSED_SECONDS
        self._fresh_until.pop(topic, None)
        return BatchRefused(
            f"produce to {topic}: the record went to Kafka in a batch that is larger than the topic allows "
            f"({' or '.join(_SETTINGS)}), and is not written: send it again"
        )

    def _set(self, topic: str, most_bytes: float) -> int:
        if most_bytes >= self._usual_bytes:
            self._bytes.pop(topic, None)
            return self._usual_bytes
        self._bytes[topic] = size = 1 << (max(1, int(most_bytes)).bit_length() - 1)
        return size


class Batches:
    """Ends the batches of a client in time where a topic has a limit. Belongs to the thread that may wait for it."""

    def __init__(self, limits: BatchLimits, batch_bytes: int, flush: Callable[[], Any]) -> None:
        """Prepare; `flush` sends what the client holds and waits for it, `batch_bytes` is the client's own limit."""
        self._limits = limits
        self._flush = flush
        self._batch_bytes = batch_bytes
        self._sizes: dict[str, int] = {}
        self._held_bytes: dict[str, int] = {}

    def make_room(self, topic: str, size_bytes: int) -> None:
        """Call before each record that the client gets."""
        limit = self._limits.of(topic) or self._batch_bytes
        changed = limit != self._sizes.setdefault(topic, limit)
        if limit == self._batch_bytes and not changed:
            return
        held = self._held_bytes.get(topic, 0)
        if changed or (held and held + size_bytes > limit):
            self._flush()
            self._held_bytes.clear()
            self._sizes[topic], held = limit, 0
        self._held_bytes[topic] = held + size_bytes

    def refusal(self, error: confluent_kafka.KafkaError, record: confluent_kafka.Message) -> BatchRefused | None:
        """Return what `BatchLimits.refusal` says of a record of these batches."""
        return self._limits.refusal(error, record, self._sizes.get(str(record.topic()), self._batch_bytes))


def wire_bytes(key: bytes | None, value: bytes | None, headers: list[Header] | None = None) -> int:
    """Return about how many bytes a record has in a batch."""
    size = _HEADER_BYTES * (2 + len(headers or ())) + len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(text or b"") for name, text in headers or ())
