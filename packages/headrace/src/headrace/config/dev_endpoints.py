"""Where the dev cluster of a working folder writes its addresses, and the variables that these are."""

from pathlib import Path
from typing import Any, Final

HOME: Final = Path(".headrace/dev")
"""Folder of the dev cluster of a working folder."""
ENDPOINTS: Final = HOME / "endpoints.json"
"""Its addresses, while it runs."""


def environment(endpoints: dict[str, Any]) -> dict[str, str]:
    """Return the variables that a configuration refers to, from what `endpoints.json` holds."""
    variables = {"KAFKA": endpoints["kafka"]["bootstrap_servers"]}
    if "schema_registry" in endpoints:
        variables["SCHEMA_REGISTRY_URL"] = endpoints["schema_registry"]["url"]
    if secured := endpoints.get("secured"):
        variables["KAFKA_SASL_SSL"] = secured["sasl_ssl"]["bootstrap_servers"]
        variables["KAFKA_SSL"] = secured["ssl"]["bootstrap_servers"]
        variables["TOKEN_URL"] = secured["token_url"]
        if "schema_registry" in secured:
            variables["SCHEMA_REGISTRY_TLS_URL"] = secured["schema_registry"]["url"]
    return variables
