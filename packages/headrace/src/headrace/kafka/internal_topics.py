"""Internal topics: only Headrace writes them, so their records and headers can be trusted.

Requests, functions, pipelines, replays, redrives and subscriptions by pattern use this definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from headrace.config.consumers import DeadLetterConfig, ReactiveConsumerConfig, RetryConfig
from headrace.config.model import HeadraceConfig
from headrace.config.section import fits_any
from headrace.config.topic_names import Kind, kind_by_name
from headrace.errors import TopicInternal

_ORIGIN: Final = "{topic}"
_MOST_KNOWN: Final = 10_000
_MOST_CHARACTERS: Final = 249


class Owner(Protocol):
    """A reactive consumer, or a trigger of a function."""

    @property
    def topics(self) -> list[str]:
        """Topics it reads in any case."""

    @property
    def group(self) -> str:
        """Its consumer group."""

    @property
    def dead_letter(self) -> DeadLetterConfig:
        """Where it writes dead letters."""

    @property
    def retry(self) -> RetryConfig:
        """How often it repeats a delivery, and its retry topics."""


class InternalTopics:
    """The internal topics of one configuration and of the registered consumers."""

    def __init__(self, config: HeadraceConfig) -> None:
        self._state = {config.audit.topic, config.producer.idempotency.topic, config.control.topic}
        self._owners: list[Owner] = [*config.reactive_consumers.values()]
        self._registered: list[Owner] = []
        self.foreign = config.foreign_dead_letters
        """Dead letter topics that other products write, and the topics each has dead letters of."""
        self.registrations = 0
        """How often `register` was called."""
        self._known: dict[str, Kind] = {}

    @property
    def owners(self) -> Sequence[Owner]:
        """Consumers of the configuration, and registered ones."""
        return [*self._owners, *self._registered]

    def add(self, owners: Iterable[Owner]) -> None:
        """Add consumers of the configuration."""
        self._owners += owners
        self._known.clear()

    def register(self, owners: Iterable[Owner]) -> None:
        """Replace the registered consumers."""
        self._registered = list(owners)
        self.registrations += 1
        self._known.clear()

    def kind_of(self, topic: str) -> Kind:
        kind = self._known.get(topic)
        if kind is None:
            if len(topic) > _MOST_CHARACTERS:
                return ""  # not a valid topic name; keeping it would let a client fill the memory
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            kind = self._known[topic] = self._kind_of(topic)
        return kind

    def check_writable(self, topic: str, *, admin: bool) -> None:
        """Raise TopicInternal if a topic is internal; callers with `admin` may write to dead letter topics."""
        kind = self.kind_of(topic)
        if kind and not (admin and kind == "dead_letter"):
            text = "a dead letter topic: writing it requires the scope admin" if kind == "dead_letter" else "internal"
            raise TopicInternal(f"{topic} is {text}; only Headrace writes there, so name a topic of yours", topic=topic)

    def fits_of(self, reactive: ReactiveConsumerConfig) -> Callable[[str], bool] | None:
        """Return a function that returns whether a consumer's patterns match a topic; None if it has no patterns."""
        if not reactive.topic_patterns:
            return None
        fits = fits_any(reactive.topic_patterns)
        return lambda topic: fits(topic) and not self.kind_of(topic)

    def _kind_of(self, topic: str) -> Kind:
        if topic in self._state:
            return "state"
        if kind := kind_by_name(topic):
            return kind
        holds = topic in self.foreign or any(_is_dead_letter_topic(owner, topic) for owner in self.owners)
        return "dead_letter" if holds else ""


def _is_dead_letter_topic(owner: Owner, topic: str) -> bool:
    template, patterns = owner.dead_letter.topic, getattr(owner, "topic_patterns", ())
    if not owner.dead_letter.enabled:
        return False
    if topic in map(owner.dead_letter.topic_for, owner.topics) or topic == template:
        return True
    origin = re.escape(template).replace(re.escape(_ORIGIN), "(.+)", 1).replace(re.escape(_ORIGIN), r"\1")
    found = re.fullmatch(origin, topic) if patterns and template != _ORIGIN else None
    return bool(found and found.groups() and fits_any(patterns)(found[1]))
