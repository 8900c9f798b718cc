"""The settings of active consumers."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace.config.membership import ConsumerConfig
from headrace.config.section import Count, FormatName, Number, PositiveSeconds, Section


class ActiveConsumersConfig(Section):
    """Consumers that clients create and read over HTTP."""

    key_format: ClassVar[FormatName] = "string"
    value_format: ClassVar[FormatName] = "json"
    wait_seconds: ClassVar[float] = 1.0
    """Longest wait of a read that finds nothing, unless the instance or the read says it."""
    max_read_bytes: ClassVar[int] = 204_800
    """Bytes of keys and values of one read at most, unless the read says less; a larger record is read alone."""
    linger_seconds: ClassVar[float] = 0.0
    """How long a read that has a record waits for more, up to its limits, unless the instance says it."""
    auto_commit_seconds: ClassVar[float] = 5.0
    """How often an instance with auto commit commits what its client has confirmed, unless the instance says it."""
    max_instances_per_principal: ClassVar[int] = 10
    """Instances of one caller in this process; without authentication only `max_instances` counts."""
    buffer_bytes: ClassVar[int] = 2_097_152
    """Fetched bytes that wait in one instance at most, in addition to one record."""

    enabled: bool = True
    """Whether they may be created."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    """Where a group without a committed offset starts, unless the instance says it; `none` answers an error."""
    idle_seconds: PositiveSeconds = 300.0
    """An instance that is not used for so long is closed."""
    max_instances: Count = 100
    """Instances of this process."""
    total_bytes: Annotated[int, Field(ge=1_048_576, le=8_589_934_592), Number] = 67_108_864
    """Fetched bytes of all instances at most, and bytes of all responses. The more instances, the fewer for a new one.
    The process needs up to five times as much memory."""
    array_responses: bool = False
    """Whether subscriptions and assignments are answered as arrays, as the light-4j document says."""
    consumer: ConsumerConfig = ConsumerConfig()
    """Group membership and fetching; an instance may override a part."""

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if "group.instance.id" in self.consumer.properties:
            raise ValueError(
                "consumer.properties has group.instance.id, and every instance would be that member: take it out, and "
                "send it when an instance is created"
            )
        return self
