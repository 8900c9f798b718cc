"""Reactive consumers: what is consumed, in which order and portions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from headrace.config.backend import ONE_RECORD_MODES, BackendConfig
from headrace.config.membership import ConsumerConfig, no_reset_by_itself
from headrace.config.retry import DeadLetterConfig, RetryConfig
from headrace.config.section import Count, FormatName, GroupName, Seconds, Section, TopicName
from headrace.config.topic_patterns import TopicPattern


class BatchConfig(Section):
    """How many records travel in one delivery."""

    max_records: Count = 100
    """Records per delivery at most."""
    max_bytes: Count = 102_400
    """Bytes of keys and values per delivery at most; one record always fits."""
    linger_seconds: Seconds = 0.0
    """How long a delivery waits to fill up."""


class FlowControl(Section):
    """How much a consumer holds that has not ended."""

    max_records: Count = 20_000
    """Records taken from Kafka and not ended; above, partitions are paused."""
    max_bytes: Count = 33_554_432
    """Bytes of the same."""


Ordering = Literal["partition", "key", "none"]
"""Which records wait for each other."""


class DeliveryConfig(Section):
    """In which order, how many at a time, in which portions, and how often records are delivered."""

    ordering: Ordering = "partition"
    """Unit of order: `partition` delivers one batch of a partition after another; `key` lets a record wait only for
    the earlier records of its key; `none` lets nothing wait."""
    null_keys: Literal["unordered", "ordered"] = "unordered"
    """With order `key`, records without key: wait for nothing, or for each other as those of one key."""
    max_in_flight: Count = 64
    """Deliveries under way at a time, over all partitions; with order `partition` one per partition."""
    batch: BatchConfig = BatchConfig()
    """Size of a delivery."""
    retry: RetryConfig = RetryConfig()
    """Retries of a failed record."""


class ReactiveConsumerConfig(DeliveryConfig):
    """One consumer that pushes records to a backend."""

    topics: list[TopicName] = []
    """Topics to consume."""
    topic_patterns: Annotated[list[TopicPattern], Field(max_length=100)] = []
    """Patterns (RE2's syntax, over the whole name): topics that fit one are consumed too, also those created later.
    Topics of Kafka's own and of Headrace's (dead letters, retries, audit) never fit; `topics` can name them."""
    group: GroupName
    """Consumer group."""
    backend: BackendConfig
    """Where records are delivered."""
    key_format: FormatName = "string"
    """How keys are written into the delivery."""
    value_format: FormatName = "json"
    """How values are written into the delivery."""
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    """Where undeliverable records go."""
    flow: FlowControl = FlowControl()
    """Bounds of what is held in memory."""
    consumer: ConsumerConfig = ConsumerConfig()
    """How the consumer takes part in its group and fetches."""
    auto_offset_reset: Annotated[Literal["earliest", "latest"], BeforeValidator(no_reset_by_itself)] = "earliest"
    """Where a group without committed offsets begins."""
    on_gap: Literal["stop", "continue"] = "stop"
    """When the records a group should read next were removed from the log: `stop` lets the partition stand still and
    readiness say so; `continue` goes on at the start of the log. Both name the missing offsets."""

    @model_validator(mode="after")
    def _consistent(self) -> ReactiveConsumerConfig:
        if not self.topics and not self.topic_patterns:
            raise ValueError("reads nothing: write topics, or topic_patterns")
        topics = frozenset(self.topics)
        for letters in map(self.dead_letter.topic_for, topics if self.dead_letter.enabled else ()):
            if letters in topics:
                raise ValueError(f"dead_letter.topic is {letters}, which is consumed here too: name another topic")
        self._fit_mode()
        self._fit_offsets()
        self._fit_tiers()
        if self.batch.max_records > self.flow.max_records or self.batch.max_bytes > self.flow.max_bytes:
            raise ValueError("batch is larger than flow, which bounds memory: lower batch or raise flow")
        return self

    def _fit_tiers(self) -> None:
        """Refuse what retry tiers cannot keep."""
        if self.retry.keep_key_order and (self.ordering != "key" or self.null_keys == "ordered"):
            raise ValueError(
                f"retry.keep_key_order does not go with ordering: {self.ordering} and null_keys: {self.null_keys}: it "
                "keeps the order of keys, so write ordering: key and null_keys: unordered"
            )
        if self.retry.tiers and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", self.group):
            raise ValueError(
                f"group is {self.group!r}, and retry tiers are topics named after it: use up to 200 letters, digits, "
                "dots, underscores and hyphens"
            )
        tiers = self.retry.tier_topics(self.group)
        if taken := next((name for name in (*self.topics, self.dead_letter.topic) if name in tiers), ""):
            raise ValueError(f"topics or dead_letter.topic is {taken}, a retry tier of this group: name another topic")

    def _fit_offsets(self) -> None:
        """Refuse what lets a record end before an earlier one: a store with one number per partition would lose it."""
        one_by_one = self.ordering == "partition" and self.batch.max_records == 1 and not self.retry.tiers
        if self.backend.offsets_path and not one_by_one:
            raise ValueError(
                "backend.offsets_path is set, and one offset per partition says what is done only when records end one "
                "after the other: write ordering: partition, batch: {max_records: 1}, and no retry.tiers"
            )

    def warnings(self, shared: Mapping[str, object]) -> list[str]:
        """Return what is allowed and probably not meant, given the properties of every client."""
        return self.consumer.warnings(shared, self.batch.max_bytes)

    def _fit_mode(self) -> None:
        """Let the mode decide what is not set."""
        batch, backend = self.batch, self.backend
        if backend.mode in ONE_RECORD_MODES:
            if "max_records" in batch.model_fields_set and batch.max_records != 1:
                raise ValueError(
                    f"batch.max_records is {batch.max_records}, and backend.mode {backend.mode} posts one record per "
                    "request: leave it out (max_in_flight says how many requests are under way) or choose another mode"
                )
            self.__dict__["batch"] = batch.model_copy(update={"max_records": 1})
        elif backend.mode == "results" and "max_answer_bytes" not in backend.model_fields_set:
            size = backend.max_answer_bytes + 4 * batch.max_bytes + 16_384 * batch.max_records
            self.__dict__["backend"] = backend.model_copy(update={"max_answer_bytes": size})
