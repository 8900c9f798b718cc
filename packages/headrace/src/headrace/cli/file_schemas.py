"""The JSON Schemas of the files that users write."""

from typing import Any

from headrace.config.explain import json_schema
from headrace.consumers.feature_checks import feature_checks
from headrace.extras import GUEST_OF, guest_missing


def schema_kinds() -> list[str]:
    """Return the kinds of files: `config` is headrace.yaml, the others are of features, installed or not."""
    own = [kind for checks in feature_checks() for kind in checks.schemas]
    guests = [name.removeprefix("schema ") for name in GUEST_OF if name.startswith("schema ")]
    return ["config", *dict.fromkeys([*own, *guests])]


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file.

    Raises:
        EnvironmentProblem: The package that reads such files is not installed.
    """
    if missing := guest_missing(f"schema {kind}", f"headrace config schema {kind}"):
        raise missing
    made = next((checks.schemas[kind] for checks in feature_checks() if kind in checks.schemas), json_schema)
    return made()
