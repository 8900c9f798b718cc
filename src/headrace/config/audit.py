"""The settings of the audit."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from headrace.config.section import Section, TopicName


class AuditConfig(Section):
    """Who wrote, consumed, controlled and was refused what; kept apart from the logs."""

    max_pending_bytes: ClassVar[int] = 134_217_728
    """Bytes of events, and of records whose events are not made yet; above it events are dropped and counted."""

    to: Literal["file", "topic", "none"] = "file"
    """`file`: a file that is replaced when it is full; `topic`: a Kafka topic; `none`: nowhere."""
    records: Literal["summary", "all", "failed", "none"] = "failed"
    """Which records have events. `summary`: one event per produce request and per delivery, and one per record that did
    not end well; `all`: one event per record; `failed`: only what did not end well; `none`: none. The default is
    `summary` when `to` is in the file, and `failed` otherwise."""
    topic: TopicName = "sidecar-audit"
    """Topic of the events."""
    file: Path = Path(".headrace/sidecar-audit.log")
    """File of the events, a line of JSON each, relative to this file; rotated at 200 MB, with five old ones."""
    service_id: str = "headrace"
    """Name of this Headrace in the events."""

    @model_validator(mode="before")
    @classmethod
    def _summary_when_there_is_a_target(cls, values: Any) -> Any:
        return {"records": "summary", **values} if isinstance(values, dict) and "to" in values else values
