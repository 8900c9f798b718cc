"""Where it is noted who did what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from headrace.config.section import Count, Section, TopicName


class AuditConfig(Section):
    """Who wrote, consumed and steered what and who was refused, noted apart from the logs."""

    to: Literal["file", "topic", "none"] = "file"
    """`file`: a file that is replaced when it is full; `topic`: a Kafka topic; `none`: nowhere."""
    records: Literal["all", "failed", "none"] = "failed"
    """Which records are noted, written and consumed; `all` when `to` is written in the file and this is not."""
    topic: TopicName = "sidecar-audit"
    """Topic of the notes."""
    file: Path = Path(".headrace/sidecar-audit.log")
    """File of the notes, a line of JSON each, relative to this file."""
    max_file_bytes: Count = 200_000_000
    """Size at which the file is put aside and a new one begun."""
    old_files: Count = 5
    """Files that are kept beside the one being written."""
    keys: Literal["hash", "text", "none"] = "hash"
    """How keys of records are noted: the first half of their SHA-256, as they are, or not at all."""
    service_id: str = "headrace"
    """Name of this Headrace in the notes."""
    max_pending_bytes: Count = 134_217_728
    """Bytes of records whose notes are not written yet; above, notes are dropped and counted."""

    @model_validator(mode="before")
    @classmethod
    def _all_when_asked_for(cls, values: Any) -> Any:
        return {"records": "all", **values} if isinstance(values, dict) and "to" in values else values
