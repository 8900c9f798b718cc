"""Producing over HTTP."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from headrace.config.kafka import ProducerProperties
from headrace.config.section import Count, FormatName, Number, PositiveSeconds, Section, TopicName


class TransactionsConfig(Section):
    """How requests are written as transactions."""

    id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{0,200}$")] = ""
    """Start of the producers' names in Kafka (`transactional.id`); empty means `headrace-<host>-<http.port>`. \
A process that opens a name ends the open transactions of the previous process with that name, and fences it. \
So it must be the same after a restart, and no two running processes may share it. Set it where the host's name \
changes with a restart; else the transactions of a lost process end only after `timeout_seconds`."""
    producers: Count = 2
    """Transactions that are written at a time; requests that wait share one. Each is a Kafka client of its own."""
    timeout_seconds: PositiveSeconds = 10.0
    """How long Kafka keeps a transaction open whose process is lost (`transaction.timeout.ms`), and the longest wait \
for the acknowledgement of its records."""
    max_waiting: Count = 64
    """Requests that are being written or wait; above this, requests are answered 503 at once."""


class IdempotencyConfig(Section):
    """How answers to requests with an `Idempotency-Key` are stored."""

    topic: TopicName = "_headrace-idempotency"
    """Topic that stores the keys over a restart, created with the first key; only Headrace writes it."""
    window_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long a key is remembered."""
    max_keys: Count = 1_000_000
    """Keys that are remembered at most; above, the oldest is forgotten."""
    max_bytes: Count = 134_217_728
    """Memory for keys and answers, about; above, the oldest are forgotten."""


_MOST = 2**31 - 1
_IDEMPOTENT_IN_FLIGHT = 5
_ACKS = {"-1": "all", "0": 0, "1": 1}  # and True is not 1


class ProducerConfig(Section):
    """How records are produced over HTTP."""

    enabled: bool = True
    """Whether `POST /producers/{topic}` is served."""
    key_format: FormatName = "string"
    """Format of keys when a request names none."""
    value_format: FormatName = "json"
    """Format of values when a request names none."""
    format_codes: Literal["documented", "light-4j"] = "documented"
    """Formats given as a number: in the documented order, or in that of light-4j's code (1 json, 2 avro)."""
    format_from_subject: bool = False
    """Whether the newest schema under the subject, if there is one, decides the format when a request names none."""
    subject_strategy: Literal["topic", "record", "topic_record"] = "topic"
    """Subject of a schema: `{topic}-key` and `{topic}-value`, the schema's own full name, or `{topic}-{name}`."""
    auto_register: bool = True
    """Whether schema text in a request is registered when the registry does not have it under the subject."""
    idempotence: bool = True
    """Whether the client's own retries neither double nor reorder records (Kafka's `enable.idempotence`)."""
    acks: Annotated[Literal["all", 1, 0], BeforeValidator(lambda value: _ACKS.get(str(value), str(value)))] = "all"
    """Who must have a record before it is acknowledged: `all` in-sync replicas, the leader (1), no broker (0). \
1 and 0 need `idempotence: false`, and what they answer is weaker than ok."""
    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000), Number] = 5
    """Requests on their way to one broker (Kafka's `max.in.flight.requests.per.connection`); idempotence: 5 at most."""
    retries: Annotated[int, Field(ge=0, le=_MOST), Number] = _MOST
    """How often the client sends a batch again within the delivery timeout; idempotence: 1 at least."""
    delivery_timeout_seconds: Annotated[float, Field(ge=0.1, le=_MOST // 1000), Number] = 30.0
    """Longest wait for an acknowledgement (Kafka's `delivery.timeout.ms`); after it the outcome is unknown."""
    unreachable_seconds: Annotated[float, Field(ge=0.1, le=3600), Number] = 5.0
    """When no broker has answered for so long, requests are answered 503 at once and nothing is handed over."""
    linger_seconds: Annotated[float, Field(ge=0, le=900), Number] = 0.001
    """How long the client waits to fill a batch (Kafka's `linger.ms`); by default 0.005 for outputs of functions and \
dead letters."""
    request_timeout_seconds: Annotated[float, Field(ge=0.1, le=300), Number] | None = None
    """How long a broker may take for one attempt; by default a third of the delivery timeout, 30 at most."""
    batch_bytes: Annotated[int, Field(ge=1, le=_MOST), Number] = 1_000_000
    """Largest batch of one partition (Kafka's `batch.size`)."""
    max_record_bytes: Annotated[int, Field(ge=1000, le=1_000_000_000), Number] = 1_048_576
    """Largest record (Kafka's `max.request.size`); topics have a limit of their own (`max.message.bytes`)."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """Compression of batches (Kafka's `compression.type`)."""
    compression_level: Annotated[int, Field(ge=-1, le=12), Number] = -1
    """How hard `gzip`, `lz4` and `zstd` try; -1 is the method's own default."""
    max_pending_bytes: Annotated[int, Field(ge=1, le=10**12), Number] = 67_108_864
    """Bytes accepted and not yet acknowledged; above, requests are answered 503 at once."""
    partition_share: Annotated[float, Field(gt=0, le=1), Number] = 0.25
    """Share of the free part of `max_pending_bytes` that one partition may hold; above this, 503."""
    properties: ProducerProperties = Field(default_factory=dict)
    """Further client properties by their librdkafka names, for this producer; they win over `kafka.properties`."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Unknown fields of `POST /producers/{topic}`: answered 400, or ignored and listed in the answer as the \
light-4j sidecar's clients need it."""
    always_200: bool = False
    """Answer 200 whatever the outcome of the records, as light-4j kafka-sidecar does."""
    forward_authorization: bool = False
    """Copy the HTTP `Authorization` header into the record headers, as light-4j kafka-sidecar does."""
    caller_id: str = ""
    """Written into every record as the header `caller_id`; empty for none."""
    transactions: TransactionsConfig = TransactionsConfig()
    """`POST /transactions`, and requests with an `Idempotency-Key`."""
    idempotency: IdempotencyConfig = IdempotencyConfig()
    """Requests with an `Idempotency-Key`."""

    @property
    def attempt_seconds(self) -> float:
        """How long one attempt may take."""
        third = (self.delivery_timeout_seconds - self.linger_seconds) / 3
        return self.request_timeout_seconds or min(30.0, third)

    @property
    def lasting(self) -> Self:
        """The same, with `acks: all` and idempotence: dead letters and results need both."""
        if self.acks == "all" and self.idempotence:
            return self
        strong = {"acks": "all", "idempotence": True, "max_in_flight": _IDEMPOTENT_IN_FLIGHT, "retries": _MOST}
        return self.model_copy(update=strong)

    @property
    def warnings(self) -> list[str]:
        """Guarantees that this section weakens, a sentence each; empty with the defaults."""
        found = []
        if self.acks != "all":
            found.append(
                f"producer.acks is {self.acks}: a record that is answered may be lost when a broker fails; answers of "
                "POST /producers carry acks, and dead letters and results of functions still wait for all"
            )
        if not self.idempotence and self.retries and self.max_in_flight > 1:
            found.append(
                f"producer.idempotence is off, with {self.max_in_flight} requests in flight and retries: a retry may "
                "reorder and double records. Set max_in_flight: 1 to keep the order, or idempotence: true for both"
            )
        return found

    @field_validator("acks", "max_in_flight", "retries")
    @classmethod
    def _fits_idempotence(cls, value: Any, info: ValidationInfo) -> Any:
        """Source: KIP-98. Kafka's Java client turns idempotence off silently on such a conflict."""
        if info.data.get("idempotence") is not True:
            return value
        off = "write idempotence: false as well"
        if info.field_name == "acks" and value != "all":
            raise ValueError(f"is {value}, and idempotence, which is on, needs all: leave acks out, or {off}")
        if info.field_name == "max_in_flight" and value > _IDEMPOTENT_IN_FLIGHT:
            raise ValueError(f"is {value}, and idempotence, which is on, allows 5 at most: take 5, or {off}")
        if info.field_name == "retries" and value == 0:
            raise ValueError(f"is 0, and idempotence, which is on, needs retries: leave retries out, or {off}")
        return value

    @field_validator("linger_seconds", "request_timeout_seconds")
    @classmethod
    def _fits_delivery_timeout(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Source: Kafka's producer configuration, `delivery.timeout.ms`."""
        limit, linger = info.data.get("delivery_timeout_seconds"), info.data.get("linger_seconds", 0.0)
        if limit is not None and value is not None and value + linger >= limit:
            raise ValueError(
                f"is {value:g}, and delivery_timeout_seconds is {limit:g}: a record would time out before "
                "linger_seconds and one attempt (request_timeout_seconds) are over; make it longer than both together"
            )
        return value
