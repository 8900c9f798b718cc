"""Producing over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.section import Count, FormatName, Number, PositiveSeconds, Seconds, Section


class ProducerConfig(Section):
    """How records are produced over HTTP."""

    enabled: bool = True
    """Whether `POST /producers/{topic}` is served."""
    key_format: FormatName = "string"
    """Format of keys when a request names none."""
    value_format: FormatName = "json"
    """Format of values when a request names none."""
    format_from_subject: bool = False
    """Whether the newest schema under the subject, if there is one, decides the format when a request names none."""
    subject_strategy: Literal["topic", "record", "topic_record"] = "topic"
    """Subject of a schema: `{topic}-key` and `{topic}-value`, the schema's own full name, or `{topic}-{name}`."""
    auto_register: bool = True
    """Whether schema text in a request is registered when the registry does not have it under the subject."""
    linger_seconds: Seconds = 0.001
    """How long the client waits to fill a batch (Kafka's `linger.ms`)."""
    max_pending_bytes: Count = 67_108_864
    """Bytes accepted and not yet acknowledged; above, requests are answered 503 at once."""
    partition_share: Annotated[float, Field(gt=0, le=1), Number] = 0.25
    """How much of what is free of `max_pending_bytes` one partition may hold; above, its requests are answered 503."""
    delivery_timeout_seconds: PositiveSeconds = 30.0
    """Longest wait for an acknowledgement (Kafka's `delivery.timeout.ms`); after it the outcome is unknown."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """Compression of batches (Kafka's `compression.type`)."""
    always_200: bool = False
    """Answer 200 whatever the outcome of the records, as the original sidecar."""
    forward_authorization: bool = False
    """Copy the HTTP `Authorization` header into the record headers, as the original sidecar."""
    caller_id: str = ""
    """Written into every record as the header `caller_id`; empty for none."""
