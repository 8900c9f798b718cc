"""What is judged of a cluster: everything that a configuration reads and writes."""

from __future__ import annotations

from headrace.app.topic_requirements import topic_requirements
from headrace.config.model import HeadraceConfig


def test_retry_tiers_are_judged_as_what_their_group_reads() -> None:
    """The group's own offset passes a record that waits there, so nothing else holds it."""
    reactive = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost/"}}
    consumers = {"a": {**reactive, "retry": {"tiers": [1, 60]}}, "b": {**reactive, "group": "h"}}
    config = HeadraceConfig.model_validate({"reactive_consumers": consumers})
    ((_, required),) = topic_requirements(config, [])
    read = {each.group: ([*each.topics], [*each.retry_topics]) for each in required}
    assert read == {"g": (["t"], ["g.retry.1s", "g.retry.60s"]), "h": (["t"], [])}
