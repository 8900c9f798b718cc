"""What a pattern never takes, and what the doctor is told of: from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.app.topics_of_ours import fits_of
from headrace.app.uses import uses_of
from headrace.config.model import HeadraceConfig
from headrace.functions.load import load_function

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
    other = {"topics": ["o"], "group": "h", "backend": backend, "dead_letter": {"topic": "all-letters"}}
    consumers = {"wide": wide, "other": other}
    return HeadraceConfig.model_validate({"reactive_consumers": consumers, "functions": [tmp_path / "function.yaml"]})


def test_a_pattern_takes_no_topic_of_ours(tmp_path: Path) -> None:
    """Dead letters by the names of every consumer and function, retries of their groups, and notes."""
    config = config_of(tmp_path)
    functions = [load_function(file) for file in config.functions]
    fits = fits_of(config.reactive_consumers["wide"], config, functions)
    assert fits is not None
    ours = ["o.dlq", "all-letters", "dead.in.x", "g.retry.10s", "fg.retry.1s", config.audit.topic]
    assert [name for name in ours if fits(name)] == []
    theirs = ["orders", ".dlq", "dead.x", "dlq.orders", "g.retry", "all-letters.x"]
    assert [name for name in theirs if fits(name)] == theirs
    assert fits_of(config.reactive_consumers["other"], config, functions) is None


def test_what_is_used_is_told_by_cluster(tmp_path: Path) -> None:
    """With the groups, the topics, and where dead letters go, if they do."""
    config = config_of(tmp_path, dead_letter={"enabled": False}, topics=["a"])
    uses = uses_of(config, [load_function(file) for file in config.functions])
    assert {servers: [use.group for use in found] for servers, found in uses.items()} == {
        "localhost:9092": ["g", "h"],
        "elsewhere:9092": ["fg"],
    }
    wide, other = uses["localhost:9092"]
    assert (list(wide.topics), wide.letters_of, wide.fits and wide.fits("b")) == (["a"], None, True)
    assert other.letters_of
    assert other.letters_of("o") == "all-letters"
    [function] = uses["elsewhere:9092"]
    assert function.letters_of
    assert function.letters_of("in") == "dead.in.x"
