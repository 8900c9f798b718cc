"""How long to pause before the next attempt."""

from __future__ import annotations

import random

from headrace.config.consumers import RetryConfig


def pause_seconds(failures: int, retry: RetryConfig, chance: random.Random) -> float:
    """Return a pause: exponential, capped, with full jitter.

    Args:
        failures: Failures so far, 1 or more.
        retry: First and longest pause.
        chance: Source of the jitter.

    Source: "full jitter" of the AWS architecture blog, "Exponential Backoff and Jitter".
    """
    ceiling = ceiling_seconds(failures, retry)
    return chance.uniform(ceiling / 10, ceiling)


def ceiling_seconds(failures: int, retry: RetryConfig) -> float:
    """Return the longest pause there may be after so many failures."""
    # 2 ** 60 seconds is past any cap; the limit keeps the power from growing without bound.
    return min(retry.max_delay_seconds, retry.first_delay_seconds * 2.0 ** min(failures - 1, 60))
