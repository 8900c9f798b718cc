"""The JSON Schemas of the files that users write."""

from typing import Any

from headrace.config.explain import json_schema
from headrace.consumers.feature_checks import feature_checks


def schema_kinds() -> list[str]:
    """Return the kinds of files: `config` is headrace.yaml, the others are those that installed features read."""
    return ["config", *(kind for checks in feature_checks() for kind in checks.schemas)]


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file."""
    made = next((checks.schemas[kind] for checks in feature_checks() if kind in checks.schemas), json_schema)
    return made()
