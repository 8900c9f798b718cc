"""The settings of active consumers."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace.config.membership import ConsumerConfig
from headrace.config.section import Count, FormatName, Number, PositiveSeconds, Section


class ActiveConsumersConfig(Section):
    """Active consumers: clients create them and read from them over HTTP."""

    key_format: ClassVar[FormatName] = "string"
    value_format: ClassVar[FormatName] = "json"
    wait_seconds: ClassVar[float] = 1.0
    """Longest wait of a read that finds nothing, unless the instance or the read sets its own."""
    max_read_bytes: ClassVar[int] = 204_800
    """Largest read, in bytes of keys and values, unless the read sets less; a larger record is read alone."""
    linger_seconds: ClassVar[float] = 0.0
    """How long a read that has a record waits for more, up to its limits, unless the instance sets its own."""
    auto_commit_seconds: ClassVar[float] = 5.0
    """How often an instance with auto commit commits what its client has confirmed, unless it sets its own."""
    max_instances_per_principal: ClassVar[int] = 10
    """Most instances of one caller in this process; without authentication only `max_instances` counts."""
    buffer_bytes: ClassVar[int] = 2_097_152
    """Most fetched bytes that wait in one instance, in addition to one record."""

    enabled: bool = True
    """Whether clients may create active consumers."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    """Where a group without a committed offset starts, unless the instance sets its own; `none`: reads fail."""
    idle_seconds: PositiveSeconds = 300.0
    """An instance that is idle for this long is closed."""
    max_instances: Count = 100
    """Most instances of this process."""
    total_bytes: Annotated[int, Field(ge=1_048_576, le=8_589_934_592), Number] = 67_108_864
    """Most fetched bytes of all instances together, and most bytes of all responses. Each further instance gets a
    smaller part. The process needs up to five times this much memory."""
    array_responses: bool = False
    """Whether the responses to requests for subscriptions and assignments are arrays, as in the light-4j document."""
    consumer: ConsumerConfig = ConsumerConfig()
    """Group membership and fetching; an instance may override some of it."""

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if "group.instance.id" in self.consumer.properties:
            raise ValueError(
                "consumer.properties has group.instance.id, so every instance would be that member: remove it, and "
                "send it when an instance is created"
            )
        return self
