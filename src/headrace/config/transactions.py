"""Transactions and idempotency keys over HTTP."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.config.section import Count, PositiveSeconds, Section, TopicName


class TransactionsConfig(Section):
    """How requests are written as transactions."""

    id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{0,200}$")] = ""
    """Start of the producers' names in Kafka (`transactional.id`); empty means `headrace-<host>-<http.port>`. \
A process that opens a name ends what the one before it left open under it, and shuts that one out if it still runs. \
So it must be the same after a restart, and no two running processes may share it. Set it where the host's name \
changes with a restart; else what a lost process left open ends only after `timeout_seconds`."""
    producers: Count = 2
    """Transactions that are written at a time; requests that wait share one. Each is a Kafka client of its own."""
    timeout_seconds: PositiveSeconds = 10.0
    """How long Kafka keeps a transaction open whose process is lost (`transaction.timeout.ms`), and the longest wait \
for the acknowledgement of its records."""
    max_waiting: Count = 64
    """Requests that are being written or wait; above, they are answered 503 at once."""


class IdempotencyConfig(Section):
    """What is remembered of requests with an `Idempotency-Key`."""

    topic: TopicName = "_headrace-idempotency"
    """Topic that keeps the keys over a restart, created with the first key; only Headrace writes it."""
    window_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long a key is remembered."""
    max_keys: Count = 1_000_000
    """Keys that are remembered at most; above, the oldest is forgotten."""
    max_bytes: Count = 134_217_728
    """Memory for keys and answers, about; above, the oldest are forgotten."""
