"""What a pattern never takes, and what the doctor is told of: from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.audit_config import AuditConfig
from headrace.config.consumers import DeadLetterConfig
from headrace.config.model import ControlConfig, HeadraceConfig
from headrace.errors import TopicInternal
from headrace.functions.load import load_function
from headrace.kafka.internal_topics import InternalTopics

KINDS = yaml.safe_load((Path(__file__).parent / "kinds_of_topics.yaml").read_text())
FUNCTION = """\
metadata: {name: f}
spec:
  handler: m:handler
  triggers:
    t:
      kind: kafka-cluster
      attributes: {topics: [in], consumerGroup: fg, brokers: [elsewhere:9092], deadLetterTopic: "dead.{topic}.x"}
"""


def config_of(tmp_path: Path, **consumer: Any) -> HeadraceConfig:
    (tmp_path / "function.yaml").write_text(FUNCTION)
    backend = {"url": "http://localhost"}
    wide = {"group": "g", "backend": backend, "topic_patterns": [".*"], **consumer}
    other = {"topics": ["o"], "group": "h", "backend": backend, "dead_letter": {"topic": "all-dead-letters"}}
    off = {"topics": ["o"], "group": "i", "backend": backend, "dead_letter": {"enabled": False, "topic": "off-{topic}"}}
    consumers = {"wide": wide, "other": other, "off": off}
    return HeadraceConfig.model_validate({"reactive_consumers": consumers, "functions": [tmp_path / "function.yaml"]})


def internal_topics(config: HeadraceConfig) -> InternalTopics:
    internal = InternalTopics(config)
    internal.add(one for file in config.functions for one in load_function(file).kafka_triggers)
    return internal


def test_a_pattern_takes_no_topic_of_ours(tmp_path: Path) -> None:
    """Dead letters by the names of every consumer and function, retries of their groups, and notes."""
    config = config_of(tmp_path)
    internal = internal_topics(config)
    fits = internal.fits_of(config.reactive_consumers["wide"])
    assert fits is not None
    ours = ["o.dlq", "all-dead-letters", "dead.in.x", "g.retry.10s", "fg.retry.1s", config.audit.topic]
    assert [name for name in ours if fits(name)] == []
    theirs = ["orders", ".dlq", "dead.x", "dlq.orders", "g.retry", "all-dead-letters.x"]
    assert [name for name in theirs if fits(name)] == theirs
    assert internal.fits_of(config.reactive_consumers["other"]) is None


@pytest.mark.parametrize(
    ("topic", "kind"), [("t" * 250 + ".dlq", ""), *((name, kind) for kind, names in KINDS.items() for name in names)]
)
def test_every_topic_has_one_kind(tmp_path: Path, topic: str, kind: str) -> None:
    """By the names that the configuration gives, by patterns where origins fit them, and else by the usual names."""
    config = config_of(tmp_path, topic_patterns=["a.*"], dead_letter={"topic": "wide-{topic}-wide"})
    config = config.model_copy(update={"audit": AuditConfig(topic="notes"), "control": ControlConfig(topic="steer")})
    internal = internal_topics(config)
    assert internal.kind_of(topic) == kind
    if kind:
        with pytest.raises(TopicInternal, match="name a topic of yours"):
            internal.check_writable(topic, admin=False)
    if kind in ("state", "retry"):
        with pytest.raises(TopicInternal):
            internal.check_writable(topic, admin=True)
    else:
        internal.check_writable(topic, admin=True)


def test_what_a_registered_consumer_makes_is_internal_while_it_is_there(tmp_path: Path) -> None:
    """Its dead letter topic, whatever its name."""
    internal = internal_topics(config := config_of(tmp_path))
    registered = config.reactive_consumers["other"].model_copy(
        update={"topics": ["in"], "dead_letter": DeadLetterConfig(topic="registered-{topic}")}
    )
    assert internal.kind_of("registered-in") == ""
    internal.register([registered])
    assert internal.kind_of("registered-in") == "dead_letter"
    internal.register([])
    assert internal.kind_of("registered-in") == ""
