"""The topics that a configuration reads and writes, as its features declare them, without a process."""

from collections.abc import Sequence

from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.preconditions import TopicRequirement
from headrace.feature import features, imported
from headrace.kafka.internal_topics import InternalTopics


def topic_requirements(
    config: HeadraceConfig, internal: InternalTopics | None = None
) -> Sequence[tuple[KafkaConfig, TopicRequirement]]:
    """Return what every feature needs of the topics of a configuration; `internal` learns its internal topics.

    Raises:
        FunctionInvalid: A function file is not usable.
    """
    internal = internal or InternalTopics(config)
    return [one for feature in features() if feature.topics for one in imported(feature.topics)(config, internal)]
