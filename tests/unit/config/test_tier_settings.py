"""Settings of retry tiers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config.consumers import ReactiveConsumerConfig, RetryConfig
from headrace.config.model import HeadraceConfig

KEEP = {"tiers": [10], "keep_key_order": True}


def consumer(retry: dict[str, Any], **settings: Any) -> ReactiveConsumerConfig:
    backend = {"url": "http://localhost:1/"}
    return ReactiveConsumerConfig.model_validate(
        {"topics": ["t"], "group": "g", "backend": backend, **settings, "retry": retry}
    )


def test_tiers_are_topics_named_after_group_and_delay() -> None:
    """So a group has its own, and an operator sees what is what."""
    assert RetryConfig(tiers=[10, 86_400]).tier_topics("g") == ["g.retry.10s", "g.retry.86400s"]
    assert consumer(KEEP, ordering="key").retry.keep_key_order


@pytest.mark.parametrize(("tiers", "is_taken"), [([5], False), ([1, 5], False), ([1], True), ([], True)])
def test_two_consumers_of_a_group_share_no_tier(tiers: list[int], is_taken: bool) -> None:
    """Or what waits for one backend would be delivered to the other."""
    one, other = consumer({"tiers": [5]}), consumer({"tiers": tiers}, topics=["u"])
    consumers = {"one": one.model_dump(), "other": other.model_dump()}
    if is_taken:
        HeadraceConfig.model_validate({"reactive_consumers": consumers})
    else:
        with pytest.raises(ValidationError, match=r"read topic g\.retry\.5s in the same group g"):
            HeadraceConfig.model_validate({"reactive_consumers": consumers})
