"""Producing over HTTP."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace.config.kafka import ProducerProperties
from headrace.config.section import Count, FormatName, Number, Section, TopicName


class TransactionsConfig(Section):
    """How requests are written as transactions."""

    internal: ClassVar = frozenset(("producers",))

    id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{0,200}$")] = ""
    """Prefix of `transactional.id` of the producers; empty: `headrace-<host>-<http.port>`. A process with this prefix \
aborts the open transactions of the process that had it before, and fences it. So it must stay the same after a \
restart, and no two running processes may share it. Set it if the host name changes with a restart; otherwise the \
transactions of a lost process end only after `transaction.timeout.ms` (10 s)."""
    producers: Count = 2
    """Most transactions that are written at the same time, each by its own Kafka client. Waiting requests share one."""


class IdempotencyConfig(Section):
    """How responses to requests with an `Idempotency-Key` are stored."""

    topic: TopicName = "_headrace-idempotency"
    """Topic that keeps the keys over a restart; created with the first key. Only Headrace writes to it."""
    window_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long a key is remembered."""


_MOST = 2**31 - 1
_IN_FLIGHT = "max.in.flight.requests.per.connection"
_IDEMPOTENT_IN_FLIGHT = 5
_DEFAULTS: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    _IN_FLIGHT: _IDEMPOTENT_IN_FLIGHT,
    "retries": _MOST,
    "delivery.timeout.ms": 30_000,
    "linger.ms": 1,
    "batch.size": 1_000_000,
    "message.max.bytes": 1_048_576,
    "compression.type": "none",
}
_ACKS: Mapping[Any, Literal["all", 1, 0]] = {"1": 1, "0": 0}


class ProducerConfig(Section):
    """How records are produced over HTTP."""

    internal: ClassVar = frozenset(("unreachable_seconds",))

    enabled: bool = True
    """Whether `POST /producers/{topic}` is served."""
    key_format: FormatName = "string"
    """Format of keys when a request names none."""
    value_format: FormatName = "json"
    """Format of values when a request names none."""
    format_codes: Literal["documented", "light-4j"] = "documented"
    """Meaning of a format's number in a request: in the documented order, or as in light-4j's code (1 json, 2 avro)."""
    auto_register: bool = True
    """Whether a schema in a request is registered if the subject does not have it."""
    unreachable_seconds: Annotated[float, Field(ge=0.1, le=3600), Number] = 5.0
    """After this long without a response from any broker, requests are answered 503 at once and nothing is sent."""
    max_pending_bytes: Annotated[int, Field(ge=1, le=10**12), Number] = 67_108_864
    """Most bytes that are accepted and not yet acknowledged; above, requests are answered 503 at once."""
    properties: ProducerProperties = Field(default_factory=dict)
    """Kafka's producer properties, such as `acks`, `linger.ms` and `compression.type`, by their librdkafka names. \
They override `kafka.properties`."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Unknown fields of `POST /producers/{topic}`. `refuse`: the response is 400. `ignore`: they are listed in the \
response, as clients of the light-4j sidecar need it."""
    always_200: bool = False
    """Whether the response is 200 even if records failed, as in light-4j kafka-sidecar."""
    transactions: TransactionsConfig = TransactionsConfig()
    """`POST /transactions`, and requests with an `Idempotency-Key`."""
    idempotency: IdempotencyConfig = IdempotencyConfig()
    """Requests with an `Idempotency-Key`."""

    @property
    def client_properties(self) -> dict[str, Any]:
        """Kafka's properties of this producer, with their defaults."""
        return {**_DEFAULTS, **self.properties}

    @property
    def acks(self) -> Literal["all", 1, 0]:
        """Who has a record when it is acknowledged: `all` in-sync replicas, the leader (1), no broker (0)."""
        return _ACKS.get(self.properties.get("acks"), "all")

    @property
    def batch_bytes(self) -> int:
        """Largest batch of one partition."""
        return int(self.client_properties["batch.size"])

    @property
    def delivery_timeout_seconds(self) -> float:
        """Longest wait for an acknowledgement; after it the outcome is unknown."""
        return float(self.client_properties["delivery.timeout.ms"]) / 1000

    @property
    def attempt_seconds(self) -> float:
        """Longest duration of one attempt: by default a third of the delivery timeout, at most 30."""
        written = self.client_properties.get("request.timeout.ms")
        if written:
            return float(written) / 1000
        linger_seconds: float = self.client_properties["linger.ms"] / 1000
        return min(30.0, (self.delivery_timeout_seconds - linger_seconds) / 3)

    def with_properties(self, changes: Mapping[str, Any]) -> Self:
        """Return the same with other values of Kafka's properties."""
        return self.model_copy(update={"properties": {**self.properties, **changes}})

    @property
    def lasting(self) -> Self:
        """The same, with `acks: all` and idempotence: dead letters and results need both."""
        weaker = ("acks", "enable.idempotence", _IN_FLIGHT, "retries")
        strong = {name: value for name, value in self.properties.items() if name not in weaker}
        is_strong = self.acks == "all" and self.client_properties["enable.idempotence"]
        return self if is_strong else self.model_copy(update={"properties": strong})

    @property
    def warnings(self) -> list[str]:
        """Guarantees that this section weakens, a sentence each; empty with the defaults."""
        found, properties = [], self.client_properties
        if self.acks != "all":
            found.append(
                f"producer.properties: acks is {self.acks}: an acknowledged record may be lost when a broker fails; "
                "responses of POST /producers have acks, and dead letters and results of functions still wait for all"
            )
        if not properties["enable.idempotence"] and properties["retries"] and properties[_IN_FLIGHT] > 1:
            found.append(
                f"producer.properties: enable.idempotence is false, with {properties[_IN_FLIGHT]} requests in flight "
                f"and retries: a retry may reorder and duplicate records. Set {_IN_FLIGHT}: 1 to keep the order, or "
                "enable.idempotence: true for both"
            )
        return found

    @model_validator(mode="after")
    def _fits_idempotence(self) -> Self:
        """Source: KIP-98. Kafka's Java client turns idempotence off silently on such a conflict."""
        properties = self.client_properties
        if not properties["enable.idempotence"]:
            return self
        on, off = "and enable.idempotence, which is on,", "write enable.idempotence: false as well"
        if self.acks != "all":
            raise ValueError(f"properties.acks is {self.acks}, {on} needs all: leave acks out, or {off}")
        if properties[_IN_FLIGHT] > _IDEMPOTENT_IN_FLIGHT:
            raise ValueError(
                f"properties.{_IN_FLIGHT} is {properties[_IN_FLIGHT]}, {on} allows 5 at most: take 5, or {off}"
            )
        if not properties["retries"]:
            raise ValueError(f"properties.retries is 0, {on} needs retries: leave retries out, or {off}")
        return self

    @model_validator(mode="after")
    def _fits_delivery_timeout(self) -> Self:
        """Source: Kafka's producer configuration, `delivery.timeout.ms`."""
        linger, attempt = self.client_properties["linger.ms"], self.properties.get("request.timeout.ms", 0)
        limit = self.client_properties["delivery.timeout.ms"]
        if linger + attempt >= limit:
            raise ValueError(
                f"properties have linger.ms {linger} and request.timeout.ms {attempt or 'by default'}, but "
                f"delivery.timeout.ms is {limit}: make it longer than both together"
            )
        return self
