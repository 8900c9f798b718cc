"""How long to pause before the next attempt."""

from __future__ import annotations

import math
import random

from headrace.config.retry import RetryConfig


def pause_seconds(failures: int, retry: RetryConfig, chance: random.Random, longest_seconds: float = math.inf) -> float:
    """Return a pause: exponential, capped, with full jitter.

    Args:
        failures: Failures so far, 1 or more.
        retry: First and longest pause.
        chance: Source of the jitter.
        longest_seconds: Cap below that of `retry`.

    Source: "full jitter" of the AWS architecture blog, "Exponential Backoff and Jitter".
    """
    # 2 ** 60 seconds is past any cap; the limit keeps the power from growing without bound.
    most = min(retry.max_delay_seconds, longest_seconds)
    ceiling = min(most, retry.first_delay_seconds * 2.0 ** min(failures - 1, 60))
    return chance.uniform(ceiling / 10, ceiling)
