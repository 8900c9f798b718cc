"""Reactive consumers: topics, order, batches, retries, dead letters."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config.backend import ONE_RECORD_MODES, BackendConfig, is_protected
from headrace.config.membership import ConsumerConfig, no_reset_by_itself
from headrace.config.references import is_secret_name
from headrace.config.section import (
    Count,
    FormatName,
    GroupName,
    NotDots,
    Number,
    PositiveSeconds,
    Seconds,
    Section,
    TopicName,
    TopicPattern,
)

Action = Literal["retry", "dead_letter", "skip", "unavailable"]
"""What a failure means: `retry` uses up an attempt; `dead_letter` ends the record at once; `skip` ends it as handled
already, counted; `unavailable` means that the destination is at fault: the delivery waits and no attempt is used up."""

_UNAVAILABLE = frozenset((401, 403, 404, 408, 425, 429, 502, 503, 504))
_CLASSES: Mapping[int, Action] = {3: "unavailable", 4: "dead_letter", 5: "retry"}


def _texts(statuses: Any) -> Any:
    if not isinstance(statuses, dict):
        return statuses
    for status in statuses:
        if not re.fullmatch(r"[345](\d\d|xx)", str(status)):
            raise ValueError(f"names {status}, which is no failure: write statuses such as 409 or 5xx (300 to 599)")
    return {str(status): action for status, action in statuses.items()}


OTHER_ERRORS = "*"
"""Stands in `retry.errors` for every class of error without a line of its own."""
ConsumerStatuses = Annotated[dict[str, Action], BeforeValidator(_texts)]
ErrorActions = dict[Annotated[str, Field(min_length=1)], Action]


def _growing_delays(delays: list[int]) -> list[int]:
    if any(later <= earlier for earlier, later in pairwise(delays)):
        raise ValueError("should grow: write each delay once, the shortest first, such as [10, 60, 600]")
    return delays


Delay = Annotated[int, Field(ge=1, le=86_400), Number]


class RetryConfig(Section):
    """What happens to a record that failed."""

    attempts: Count = 5
    """Deliveries of one record in all; after the last it becomes a dead letter."""
    first_delay_seconds: Seconds = 0.2
    """Pause before the second attempt; doubles from there, with full jitter."""
    max_delay_seconds: Seconds = 30.0
    """Longest pause."""
    deadline_seconds: PositiveSeconds | None = None
    """A record that fails this long after its first failure becomes a dead letter, whatever attempts are left."""
    statuses: ConsumerStatuses = Field(default_factory=dict)
    """What an HTTP status means, such as `409: skip` or `5xx: dead_letter`: `retry`, `dead_letter`, `skip` (handled
    already) or `unavailable` (the backend is at fault: wait, no attempt is used up). Without a line of their own 401,
    403, 404, 408, 425, 429, 502, 503, 504 and 3xx are `unavailable`; then a line such as `5xx` counts; without that,
    4xx is `dead_letter` and 5xx is `retry`."""
    errors: ErrorActions = Field(default_factory=dict)
    """Action by class of the error, such as `ValueError: dead_letter`; `"*"` stands for every other class. Without a
    line here errors are retried."""
    rollback_threshold_percent: Annotated[float | None, Field(ge=0, le=100), Number] = None
    """When more than this percentage of a delivery fails, all of it is delivered again, what succeeded included, until
    `attempts` are used up; 0 is any failure, 100 is never. Unset, only what failed is delivered again. light-4j's
    `batchRollbackThreshold: 30` counts 30 itself too: write 29.99."""
    last_retry: bool = False
    """A record that has used up its attempts ends as failed, counted and in the log, and is no dead letter again."""
    topics: Annotated[list[Delay], AfterValidator(_growing_delays)] = []
    """Delays, in seconds, of further deliveries after `attempts` are used up, such as `[10, 60, 600]`: the record
    waits in the topic `<group>.retry.<delay>s` while others are delivered. After the last it becomes a dead letter."""
    keep_key_order: bool = False
    """With one retry topic and order `key`: records wait for an earlier record of their key that is in the retry topic.
    There it has `attempts` again, a delay apart, and its key is blocked until it has ended."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.keep_key_order and len(self.topics) != 1:
            raise ValueError("keep_key_order takes exactly one delay: write one, such as topics: [10]")
        if self.topics and self.last_retry:
            raise ValueError("topics and last_retry exclude each other: a last retry has no further ones; drop one")
        if self.deadline_seconds and sum(self.topics) > self.deadline_seconds:
            raise ValueError(
                f"deadline_seconds is {self.deadline_seconds:g} and topics take {sum(self.topics)} s together, so the "
                "last one is never used: raise the deadline or drop that delay"
            )
        if self.first_delay_seconds > self.max_delay_seconds:
            raise ValueError("first_delay_seconds is greater than max_delay_seconds: lower it or raise the other")
        return self

    def topic_names(self, group: str) -> list[str]:
        """Return the retry topics of a group, the shortest delay first."""
        return [f"{group}.retry.{delay}s" for delay in self.topics]

    def action_of_status(self, status: int) -> Action:
        """Return the action for a failure status; one that HTTP does not define is retried."""
        family = status // 100
        default = _CLASSES.get(family, "retry")
        default = "unavailable" if status in _UNAVAILABLE else self.statuses.get(f"{family}xx", default)
        return self.statuses.get(str(status), default)

    def action_of_error(self, error: str, default: Action = "retry") -> Action:
        """Return the action for a class of error; a line without a dot matches any class of that name.

        The line of all other classes counts for errors that are retried by default.
        """
        others = self.errors.get(OTHER_ERRORS, default) if default == "retry" else default
        return self.errors.get(error) or self.errors.get(error.rsplit(".", 1)[-1], others)


class DeadLetterConfig(Section):
    """The topic for records that cannot be delivered."""

    enabled: bool = True
    """When false, a record that has used up its attempts stalls its partition, and the status shows it."""
    topic: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{topic\})+$", max_length=249), NotDots] = "{topic}.dlq"
    """Name of the dead letter topic; `{topic}` is the origin's name."""

    def topic_for(self, origin: str) -> str:
        """Return the dead letter topic of a topic."""
        return self.topic.replace("{topic}", origin)


class BatchConfig(Section):
    """How many records travel in one delivery."""

    max_records: Count = 100
    """Records per delivery at most."""
    max_bytes: Count = 102_400
    """Bytes of keys and values per delivery at most; one record always fits."""
    linger_seconds: Seconds = 0.0
    """How long a delivery waits to fill up."""


class FlowControl(Section):
    """Limits of the records a consumer holds in memory."""

    max_records: Count = 20_000
    """Records fetched and not ended; above this, partitions are paused."""
    max_bytes: Count = 33_554_432
    """Bytes of these records."""


Ordering = Literal["partition", "key", "none"]
"""Which records wait for each other."""


class DeliveryConfig(Section):
    """In which order, how many at a time, in which portions, and how often records are delivered."""

    ordering: Ordering = "partition"
    """Unit of order: `partition` delivers one batch of a partition after another; `key` lets a record wait only for
    the earlier records of its key, and one without key for nothing; `none` lets nothing wait."""
    max_in_flight: Count = 64
    """Deliveries in flight at a time, over all partitions; with order `partition` one per partition."""
    batch: BatchConfig = BatchConfig()
    """Size of a delivery."""
    retry: RetryConfig = RetryConfig()
    """Retries of a failed record."""


def fit_retry_topics(delivery: DeliveryConfig, group: str, topics: Sequence[str]) -> None:
    """Refuse what retry topics cannot do for a group; `topics` have another use already.

    Raises:
        ValueError: They cannot be used; the message is for the file.
    """
    retry = delivery.retry
    if retry.keep_key_order and delivery.ordering != "key":
        raise ValueError(f"retry.keep_key_order does not go with ordering: {delivery.ordering}: write ordering: key")
    if retry.topics and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", group):
        raise ValueError(
            f"group is {group!r}, and retry topics are named after it: use up to 200 letters, digits, "
            "dots, underscores and hyphens"
        )
    retry_topics = retry.topic_names(group)
    if taken := next((name for name in topics if name in retry_topics), ""):
        raise ValueError(f"topics or dead_letter.topic is {taken}, a retry topic of this group: name another topic")


class PushConfig(DeliveryConfig):
    """How records are read and pushed to a backend."""

    key_format: FormatName = "string"
    """Format of keys in the delivery."""
    value_format: FormatName = "json"
    """Format of values in the delivery."""
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    """The topic for undeliverable records."""
    flow: FlowControl = FlowControl()
    """Limits of the records held in memory."""
    consumer: ConsumerConfig = ConsumerConfig()
    """How the consumer takes part in its group and fetches."""
    auto_offset_reset: Annotated[Literal["earliest", "latest"], BeforeValidator(no_reset_by_itself)] = "earliest"
    """Where a group without committed offsets starts."""
    on_gap: Literal["stop", "continue"] = "stop"
    """When the records a group should read next were removed from the log: `stop` stalls the partition and
    readiness reports it; `continue` resumes at the start of the log. Both name the missing offsets."""


class ReactiveConsumerConfig(PushConfig):
    """One consumer that pushes records to a backend."""

    topics: list[TopicName] = []
    """Topics to consume."""
    topic_patterns: Annotated[list[TopicPattern], Field(max_length=100)] = []
    """Patterns (RE2's syntax, over the whole name): topics that fit one are consumed too, also those created later.
    Topics of Kafka's own and of Headrace's (dead letters, retries, audit) never match; `topics` can name them."""
    group: GroupName
    """Consumer group."""
    backend: BackendConfig
    """Where records are delivered."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.topics and not self.topic_patterns:
            raise ValueError("reads nothing: write topics, or topic_patterns")
        topics = frozenset(self.topics)
        for dlq in map(self.dead_letter.topic_for, topics if self.dead_letter.enabled else ()):
            if dlq in topics:
                raise ValueError(f"dead_letter.topic is {dlq}, which is consumed here too: name another topic")
        self._fit_mode()
        self._fit_offsets()
        fit_retry_topics(self, self.group, [*self.topics, self.dead_letter.topic])
        if self.batch.max_records > self.flow.max_records or self.batch.max_bytes > self.flow.max_bytes:
            raise ValueError("batch is larger than flow, which bounds memory: lower batch or raise flow")
        return self

    def _fit_offsets(self) -> None:
        """Refuse settings under which a record may end before an earlier one, if one offset per partition is stored."""
        one_by_one = self.ordering == "partition" and self.batch.max_records == 1 and not self.retry.topics
        if self.backend.offsets_path and not one_by_one:
            raise ValueError(
                "backend.offsets_path is set, and one offset per partition says what is done only when records end one "
                "after the other: write ordering: partition, batch: {max_records: 1}, and no retry.topics"
            )

    def warnings(self, shared: Mapping[str, object]) -> list[str]:
        """Return what is allowed and probably a mistake, given the properties of every client."""
        found, backend = self.consumer.warnings(shared, self.batch.max_bytes), self.backend
        if (backend.oauth or any(map(is_secret_name, backend.headers))) and not is_protected(backend.url):
            found.append("backend.url is not https, so the network can read the secrets in its headers: use https")
        return found

    def _fit_mode(self) -> None:
        """Set what the mode decides and the file does not set."""
        batch, backend = self.batch, self.backend
        if backend.mode in ONE_RECORD_MODES:
            if "max_records" in batch.model_fields_set and batch.max_records != 1:
                raise ValueError(
                    f"batch.max_records is {batch.max_records}, and backend.mode {backend.mode} posts one record per "
                    "request: leave it out (max_in_flight says how many requests are in flight) or choose another mode"
                )
            self.__dict__["batch"] = batch.model_copy(update={"max_records": 1})

    @property
    def max_response_bytes(self) -> int:
        """Largest response that is read; as results it may echo the records."""
        echo = 4 * self.batch.max_bytes + 16_384 * self.batch.max_records
        return 1_048_576 + (echo if self.backend.mode == "results" else 0)
