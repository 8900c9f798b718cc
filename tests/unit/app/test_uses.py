"""What is judged of a cluster: everything that a configuration reads and writes."""

from __future__ import annotations

from headrace.app.uses import uses_of
from headrace.config.model import HeadraceConfig


def test_retry_tiers_are_judged_as_what_their_group_reads() -> None:
    """The group's own offset passes a record that waits there, so nothing else holds it."""
    reactive = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost/"}}
    consumers = {"a": {**reactive, "retry": {"tiers": [1, 60]}}, "b": {**reactive, "group": "h"}}
    config = HeadraceConfig.model_validate({"reactive_consumers": consumers})
    (uses,) = uses_of(config, []).values()
    known = ["t", "g.retry.1s", "g.retry.60s", "g.retry.2s", "h.retry.1s"]
    read = {use.group: [*use.topics, *filter(use.fits or (lambda _: False), known)] for use in uses}
    assert read == {"g": ["t"], "h": ["t"], "g.retry": ["g.retry.1s", "g.retry.60s"]}
