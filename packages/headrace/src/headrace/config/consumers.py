"""Reactive consumers: topics, order, batches, retries, dead letters."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config.backend import ONE_RECORD_MODES, BackendConfig, is_protected
from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.membership import ConsumerConfig, no_reset_by_itself
from headrace.config.references import is_secret_name
from headrace.config.section import (
    Count,
    FormatName,
    GroupName,
    NotDots,
    Number,
    Seconds,
    Section,
    TopicName,
    TopicPattern,
)
from headrace.errors import HeadraceError
from headrace.extras import hook

Action = Literal["retry", "dead_letter", "skip", "unavailable"]
"""What a failure means. `retry` uses up an attempt. `dead_letter` makes the record a dead letter at once. `skip` counts
it as already handled. `unavailable` blames the destination: the delivery waits, and no attempt is used up."""

_UNAVAILABLE = frozenset((401, 403, 404, 408, 425, 429, 502, 503, 504))
_CLASSES: Mapping[int, Action] = {3: "unavailable", 4: "dead_letter", 5: "retry"}


def _texts(statuses: Any) -> Any:
    if not isinstance(statuses, dict):
        return statuses
    for status in statuses:
        if not re.fullmatch(r"[345](\d\d|xx)", str(status)):
            raise ValueError(f"{status} is not a failure status: write statuses such as 409 or 5xx (300 to 599)")
    return {str(status): action for status, action in statuses.items()}


OTHER_ERRORS = "*"
"""In `retry.errors`: every class of error that has no line."""
ConsumerStatuses = Annotated[dict[str, Action], BeforeValidator(_texts)]
ErrorActions = dict[Annotated[str, Field(min_length=1)], Action]


def _growing_delays(delays: list[int]) -> list[int]:
    if any(later <= earlier for earlier, later in pairwise(delays)):
        raise ValueError("must be in ascending order, without repeats, such as [10, 60, 600]: correct it")
    return delays


Delay = Annotated[int, Field(ge=1, le=86_400), Number]


class RetryConfig(Section):
    """What happens to a record that failed."""

    attempts: Count = 5
    """Most deliveries of one record; after the last failure it becomes a dead letter."""
    first_delay_seconds: Seconds = 0.2
    """Pause before the second attempt; it doubles for each further one, with full jitter."""
    max_delay_seconds: Seconds = 30.0
    """Longest pause between attempts."""
    statuses: ConsumerStatuses = Field(default_factory=dict)
    """Action by HTTP status, such as `409: skip` or `5xx: dead_letter`. `retry` uses up an attempt; `skip` counts the
    record as already handled; `unavailable` waits for the backend and uses up no attempt. Without their own line 401,
    403, 404, 408, 425, 429, 502, 503 and 504 are `unavailable`. For others a line such as `5xx` counts; without one
    3xx is `unavailable`, 4xx is `dead_letter` and 5xx is `retry`."""
    errors: ErrorActions = Field(default_factory=dict)
    """Action by class of error, such as `ValueError: dead_letter`; `"*"` is every other class. Errors without a line
    are retried."""
    rollback_threshold_percent: Annotated[float | None, Field(ge=0, le=100), Number] = None
    """When more than this percentage of a delivery fails, all of it is delivered again until `attempts` are used up,
    including the records that succeeded. 0: after any failure. 100: never. Unset: only failed records are delivered
    again. light-4j's `batchRollbackThreshold: 30` includes 30 itself: write 29.99."""
    last_retry: bool = False
    """Whether a record that has used up its attempts is discarded, with a log line and a count, instead of becoming a
    dead letter again."""
    topics: Annotated[list[Delay], AfterValidator(_growing_delays)] = []
    """Delays, in seconds, of further deliveries after `attempts` are used up, such as `[10, 60, 600]`. Meanwhile the
    record waits in the topic `<group>.retry.<delay>s`, and others are delivered. After the last it becomes a dead
    letter."""
    keep_key_order: bool = False
    """With one retry topic and `ordering: key`: a record waits for an earlier one of its key in the retry topic. That
    one has `attempts` again, a delay apart, and blocks its key until it is completed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.keep_key_order and len(self.topics) != 1:
            raise ValueError("keep_key_order needs exactly one delay: write one, such as topics: [10]")
        if self.topics and self.last_retry:
            raise ValueError("topics and last_retry exclude each other: remove one of them")
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


class RowsRetry(RetryConfig):
    """What happens to a row that a backend refused."""

    internal: ClassVar = frozenset(("errors", "rollback_threshold_percent", "last_retry"))


def condition_of(text: str) -> Any:
    """Return the check of a condition in SQL, made by the package of queries; HeadraceError if it is not valid."""
    return hook("record_condition", "where")(text)


def _condition(text: str) -> str:
    try:
        if text:
            condition_of(text)
    except HeadraceError as cause:
        raise ValueError(cause.description) from None
    return text


Where = Annotated[str, Field(max_length=10_000), AfterValidator(_condition)]
"""A condition in SQL over one record; empty for none."""


def fit_condition(where: str, value_format: str) -> None:
    """Raise ValueError if a condition reads values in a format that it cannot read."""
    if where and value_format in SCHEMA_TYPES and condition_of(where).reads_value:
        raise ValueError(
            f"where reads the value, and its format is {value_format}, not JSON: use key or headers, or a pipeline"
        )


class DeadLetterConfig(Section):
    """The topic for records that cannot be delivered."""

    enabled: bool = True
    """Whether there are dead letters. Without them a record that has used up its attempts stalls its partition, which
    the status shows."""
    topic: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{topic\})+$", max_length=249), NotDots] = "{topic}.dlq"
    """Name of the dead letter topic; `{topic}` is the name of the source topic."""

    def topic_for(self, origin: str) -> str:
        return self.topic.replace("{topic}", origin)


class BatchConfig(Section):
    """How many records are in one delivery."""

    max_records: Count = 100
    """Most records of a delivery."""
    max_bytes: Count = 102_400
    """Most bytes of keys and values of a delivery; one record always fits."""
    linger_seconds: Seconds = 0.0
    """How long a delivery waits for more records."""


class RowsBatch(BatchConfig):
    """How many rows are in one delivery."""

    internal: ClassVar = frozenset(("linger_seconds",))


class FlowControl(Section):
    """Limits of the records that a consumer has in memory."""

    max_records: Count = 20_000
    """Most records that are fetched and not completed; above this, partitions are paused."""
    max_bytes: Count = 33_554_432
    """Most bytes of these records."""


Ordering = Literal["partition", "key", "none"]
"""Which records wait for each other."""


class DeliveryConfig(Section):
    """Order, concurrency, batches and retries of deliveries."""

    ordering: Ordering = "partition"
    """Which records wait for each other. `partition`: one batch of a partition at a time. `key`: a record waits for the
    earlier records of its key; one without a key waits for none. `none`: no record waits."""
    max_in_flight: Count = 64
    """Most deliveries in flight, over all partitions; with `ordering: partition`, one per partition."""
    batch: BatchConfig = BatchConfig()
    """Size of a delivery."""
    retry: RetryConfig = RetryConfig()
    """Retries of a failed record."""


def fit_retry_topics(delivery: DeliveryConfig, group: str, topics: Sequence[str]) -> None:
    """Reject retry topics that a group cannot use; `topics` already have another use.

    Raises:
        ValueError: They cannot be used; the message is for the file.
    """
    retry = delivery.retry
    if retry.keep_key_order and delivery.ordering != "key":
        raise ValueError(f"retry.keep_key_order needs another order than {delivery.ordering}: write ordering: key")
    if retry.topics and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", group):
        raise ValueError(
            f"group is {group!r}, and retry topics are named after it: use up to 200 letters, digits, "
            "dots, underscores and hyphens"
        )
    retry_topics = retry.topic_names(group)
    taken = next((name for name in topics if name in retry_topics), "")
    if taken:
        raise ValueError(f"topics or dead_letter.topic is {taken}, a retry topic of this group: use another topic")


class SourceConfig(DeliveryConfig):
    """How records of topics are read and delivered."""

    retry: RetryConfig = RetryConfig()
    """Retries of a failed record."""
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    """The topic for undeliverable records."""
    flow: FlowControl = FlowControl()
    """Limits of the records in memory."""
    consumer: ConsumerConfig = ConsumerConfig()
    """Group membership and fetching."""
    auto_offset_reset: Annotated[Literal["earliest", "latest"], BeforeValidator(no_reset_by_itself)] = "earliest"
    """Where a group without committed offsets starts."""
    on_gap: Literal["stop", "continue"] = "stop"
    """What to do when the log no longer has the next records of a group. `stop`: the partition stalls, and readiness
    reports it. `continue`: resume at the start of the log. Both name the missing offsets."""


class RowsConfig(SourceConfig):
    """How rows are pushed to a backend: what a reactive consumer has, without its tuning."""

    internal: ClassVar = frozenset(("flow", "consumer", "on_gap"))

    batch: RowsBatch = RowsBatch()
    """Size of a delivery."""
    retry: RowsRetry = RowsRetry()
    """Retries of a failed row."""


class ReactiveConsumerConfig(SourceConfig):
    """One consumer that pushes records to a backend."""

    key_format: FormatName = "string"
    """Format of keys in the delivery."""
    value_format: FormatName = "json"
    """Format of values in the delivery."""
    topics: list[TopicName] = []
    """Topics to consume."""
    topic_patterns: Annotated[list[TopicPattern], Field(max_length=100)] = []
    """Patterns (RE2 syntax, for the whole name) of further topics to consume, including those created later. Internal
    topics of Kafka and of Headrace (dead letters, retries, audit) never match; `topics` can name them."""
    group: GroupName
    """Consumer group."""
    where: Where = ""
    """Condition in SQL over `key`, `value`, `headers`, `topic`, `partition`, `offset` and `timestamp`, such as
    `value.amount > 100`. A record for which it is not true is completed without a delivery. One for which it cannot be
    decided fails for good, as one that cannot be decoded."""
    max_age_seconds: Annotated[float | None, Field(gt=0), Number] = None
    """Age, by its timestamp, from which a record is not delivered. It becomes a dead letter; with `retry.errors:
    {RecordExpired: skip}` it is discarded and counted. Unset: no limit."""
    backend: BackendConfig
    """Where records are delivered."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.topics and not self.topic_patterns:
            raise ValueError("has no topics: set topics or topic_patterns")
        topics = frozenset(self.topics)
        for dlq in map(self.dead_letter.topic_for, topics if self.dead_letter.enabled else ()):
            if dlq in topics:
                raise ValueError(f"dead_letter.topic is {dlq}, which this consumer also reads: use another topic")
        fit_condition(self.where, self.value_format)
        fitted = self._fit_mode()
        fitted._check_offsets()
        fit_retry_topics(self, self.group, [*self.topics, self.dead_letter.topic])
        fitted._check_flow()
        return fitted

    def _check_flow(self) -> None:
        if self.batch.max_records > self.flow.max_records:
            most = self.flow.max_records
            raise ValueError(f"batch is larger than flow, which limits memory to {most} records: lower batch")
        if self.batch.max_bytes > self.flow.max_bytes:
            raise ValueError("batch is larger than flow, which limits memory: lower batch or raise flow")

    def _check_offsets(self) -> None:
        """Reject settings that let a record overtake an earlier one, if the backend stores one offset per partition."""
        one_by_one = self.ordering == "partition" and self.batch.max_records == 1 and not self.retry.topics
        if self.backend.offsets_path and not one_by_one:
            raise ValueError(
                "backend.offsets_path is set, so records must be completed one after the other: write ordering: "
                "partition, batch: {max_records: 1}, and no retry.topics"
            )

    def warnings(self, shared: Mapping[str, object]) -> list[str]:
        """Return what is allowed and probably a mistake, given the properties of every client."""
        found, backend = self.consumer.warnings(shared), self.backend
        if (backend.oauth or any(map(is_secret_name, backend.headers))) and not is_protected(backend.url):
            found.append("backend.url is not https, so the network can read the secrets in its headers: use https")
        return found

    def _fit_mode(self) -> Self:
        """Return these settings with what the mode decides and the file does not set."""
        batch, mode = self.batch, self.backend.mode
        if mode not in ONE_RECORD_MODES or batch.max_records == 1:
            return self
        if "max_records" in batch.model_fields_set:
            raise ValueError(
                f"batch.max_records is {batch.max_records}, but backend.mode {mode} posts one record per request: "
                "remove it (max_in_flight limits the requests in flight) or choose another mode"
            )
        return self.model_copy(update={"batch": batch.model_copy(update={"max_records": 1})})

    @property
    def max_response_bytes(self) -> int:
        """Largest response that is read; as results it may echo the records."""
        echo = 4 * self.batch.max_bytes + 16_384 * self.batch.max_records
        return 1_048_576 + (echo if self.backend.mode == "results" else 0)
