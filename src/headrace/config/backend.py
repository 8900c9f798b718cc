"""Backends: where reactive consumers deliver, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import PositiveSeconds, Section, Url


class BackendConfig(Section):
    """The HTTP endpoint a reactive consumer delivers to."""

    url: Url
    """Where records are posted."""
    timeout_seconds: PositiveSeconds = 30.0
    """Longest wait for one answer."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request."""
    mode: Literal["results", "status"] = "results"
    """`results`: the answer's body has one result per record; `status`: 2xx means all records are done."""
