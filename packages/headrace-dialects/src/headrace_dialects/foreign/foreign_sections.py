"""The keys of `headrace.yaml` for dead letters that other products write."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator

from headrace.config.model import HeadraceConfig
from headrace.config.section import Section, TopicName
from headrace.config.topic_names import external_topic
from headrace_dialects.foreign.foreign_readers import RETRY_TOPIC


def _origin(topic: str) -> str:
    if re.fullmatch(RETRY_TOPIC, topic):
        raise ValueError(f"is {topic}, a retry topic of Spring, where no dead letter may go back: write its main topic")
    return external_topic(topic)


Origin = Annotated[TopicName, AfterValidator(_origin)]


class DeadLettersConfig(Section):
    """Dead letters."""

    foreign: dict[TopicName, Origin | list[Origin]] = {}
    """Dead letter topics that other products write, and the topic or topics that each has dead letters of. They are
    listed, and their dead letters go back only to these topics. Over HTTP only the scope `admin` may write to them."""


class ForeignSections(HeadraceConfig):
    """The file with these keys."""

    dead_letters: DeadLettersConfig = DeadLettersConfig()
    """Dead letters of other products."""

    @property
    def foreign_dead_letters(self) -> Mapping[str, Sequence[str]]:
        """Dead letter topics that other products write, and the topics each has dead letters of."""
        named = self.dead_letters.foreign.items()
        return {topic: [origins] if isinstance(origins, str) else origins for topic, origins in named}
