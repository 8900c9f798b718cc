"""The secrets of a driver and of its Python workers, in a file that only its owner can read."""

import json
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace.config.section import Section

SECRETS_FILE = "secrets.properties"
"""Name of the file with secrets, in the working folders of the driver and of executors."""
KAFKA, REGISTRY = "headrace.kafka", "headrace.schema_registry"
"""Names of settings in the secrets file: how Python workers reach Kafka and the schema registry."""


def with_secrets(section: Section) -> str:
    """Return a section with its secrets, as JSON; only for standard input of the driver and for the secrets file."""

    def plain(value: Any) -> str:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    return json.dumps(section.model_dump(by_alias=True, exclude_unset=True), default=plain)


def secret(file: Path, name: str) -> str:
    """Return what the secrets file has of a name."""
    [line] = [line for line in file.read_text("ascii").splitlines() if line.startswith(f"{name}=")]
    return bytes.fromhex(line.partition("=")[2].replace("\\u", "")).decode("utf-16-be")
