"""The settings of the audit."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from headrace.config.section import Section, TopicName


class AuditConfig(Section):
    """The audit, apart from the logs: who wrote, consumed or controlled what, and whose requests were refused."""

    max_pending_bytes: ClassVar[int] = 134_217_728
    """Most bytes of events, and of records whose events are not made yet; above it events are dropped and counted."""

    to: Literal["file", "topic", "none"] = "file"
    """Where events go. `file`: a file that is rotated when it is full; `topic`: a Kafka topic; `none`: nowhere."""
    records: Literal["summary", "all", "failed", "none"] = "failed"
    """Which records have events. `failed`: each record that failed. `summary`: the same, and one event per produce
    request and per delivery. `all`: every record. `none`: no record. The default is `summary` when the file sets `to`,
    else `failed`."""
    topic: TopicName = "sidecar-audit"
    """Topic of the events, with `to: topic`."""
    file: Path = Path(".headrace/sidecar-audit.log")
    """File of the events, a line of JSON each; relative to this file. It is rotated at 200 MB; five old files stay."""
    service_id: str = "headrace"
    """Name of this deployment in the events."""

    @model_validator(mode="before")
    @classmethod
    def _summary_when_there_is_a_target(cls, values: Any) -> Any:
        return {"records": "summary", **values} if isinstance(values, dict) and "to" in values else values
