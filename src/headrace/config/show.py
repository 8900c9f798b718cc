"""The configuration for people: effective values with secrets masked, and the schema of the file."""

from __future__ import annotations

from typing import Any

from headrace.config.model import HeadraceConfig
from headrace.config.secrecy import is_secret_name

MASK = "**********"
"""What stands in place of a secret."""


def masked(config: HeadraceConfig) -> dict[str, Any]:
    """Return every effective value as JSON has it; with secrets masked, by type or by name, and queries of URLs."""
    shown: dict[str, Any] = mask(config.model_dump(mode="json"))
    return shown


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors and checks.

    Source: JSON Schema 2020-12.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **HeadraceConfig.model_json_schema()}


def mask(value: Any, name: str = "") -> Any:
    """Return a value of the configuration with secrets masked, by name, and queries of URLs."""
    if isinstance(value, dict):
        return {key: mask(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [mask(item, name) for item in value]
    if name.endswith(("url", "path")) and value:
        address, query, _ = str(value).partition("?")
        return f"{address}?{MASK}" if query else value
    return MASK if value and is_secret_name(name) else value
