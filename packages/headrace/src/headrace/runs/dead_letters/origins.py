"""Proof of a dead letter's origin: without it, the writer of a dead letter could direct a redrive to any topic.

A redrive writes with the rights of its caller, and the dead letter names the topic. So that topic must be one that its
consumer reads, or a retry topic of that consumer. The consumer must also write its dead letters to the topic read here.
"""

from headrace.config.section import fits_any
from headrace.config.topic_names import Kind
from headrace.delivery.dead_letter import Origin
from headrace.kafka.internal_topics import InternalTopics, Owner

QUARANTINE = ".quarantine"
"""Ending of the name of a quarantine topic, where no redrive of the dead letter topic finds its dead letters."""
_ENDING = ".dlq"
_MOST_KNOWN = 10_000
_MOST_CHARACTERS = 255


class Origins:
    """Proves origins by the consumers of a configuration."""

    def __init__(self, internal: InternalTopics) -> None:
        self._internal = internal
        self._known: dict[tuple[str, str, str], str] = {}
        self._registrations = internal.registrations

    def refusal(self, source: str, origin: Origin) -> str:
        """Return why a dead letter of a topic may not go back to its origin; empty if it may."""
        if self._registrations != self._internal.registrations:
            self._registrations = self._internal.registrations
            self._known.clear()
        key = source, origin.group, origin.partition.topic
        why = self._known.get(key)
        if why is None:
            if not origin.partition.topic or max(map(len, key)) > _MOST_CHARACTERS:
                return "they name an origin or a group that is not valid"
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            why = self._known[key] = self._refusal(*key)
        return why

    def _refusal(self, source: str, group: str, topic: str) -> str:
        while source.endswith(QUARANTINE):
            source = source.removesuffix(QUARANTINE)
        usual = source == topic + _ENDING
        owners = [one for one in self._internal.owners if group in (one.group, f"{one.group}.retry")]
        kind = self._internal.kind_of(topic)
        if topic == source or kind == "state":
            return f"they name {topic} as their origin, and no record may go back there"
        if topic in self._internal.foreign.get(source, ()):
            return ""
        if not owners:
            if usual and kind != "dead_letter":
                return ""
            why = (
                "which is not known here: name its configuration (-c), or send the request to the Headrace that runs it"
            )
            return f"they name {topic} as their origin and the group {group}, {why}"
        readers = [one for one in owners if reads(one, topic, kind)]
        if not readers:
            return f"they name {topic} as their origin, which their group {group} does not read"
        if usual or any(one.dead_letter.topic_for(topic) == source for one in readers):
            return ""
        return (
            f"they name {topic} as their origin, and the group {group} writes its dead letters of it to another topic"
        )


def reads(consumer: Owner, topic: str, kind: Kind) -> bool:
    """Return whether a consumer reads a topic, as one of its topics or of its retry topics.

    Patterns match no internal topic.
    """
    patterns = () if kind else getattr(consumer, "topic_patterns", ())
    named = [*consumer.topics, *consumer.retry.topic_names(consumer.group)]
    return topic in named or bool(patterns and fits_any(patterns)(topic))
