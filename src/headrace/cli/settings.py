"""The configuration of every command: `./headrace.yaml` by default, and the dev cluster of this folder if it is up.

Kafka and the registry come from an option, the file, the environment (`KAFKA`, `SCHEMA_REGISTRY_URL`), the dev
cluster, or are on localhost. The dev cluster stands in for these variables where the file refers to them.
"""

import json
import os
from pathlib import Path

import click

from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.devcluster import HOME, environment

DEFAULT_FILE = Path("headrace.yaml")
ENDPOINTS = HOME / "endpoints.json"

config_option = click.option(
    "-c",
    "--config",
    "config",
    type=click.Path(path_type=Path),
    help="The configuration file; ./headrace.yaml if it is there.",
)


def variables() -> dict[str, str]:
    """Return the environment, with the variables of a running dev cluster where they are not set."""
    return {**_dev_cluster(), **os.environ}


def find_settings(file: Path | None) -> HeadraceConfig | None:
    """Return the settings of a file, by default of `./headrace.yaml`; None if that does not exist.

    Raises:
        ConfigError: The file is not usable.
    """
    if file is None and not DEFAULT_FILE.exists():
        return None
    return located(load_config(file or DEFAULT_FILE, variables()))


def located(settings: HeadraceConfig) -> HeadraceConfig:
    """Return settings in which the environment says where Kafka and the registry are, if the file does not."""
    kafka, registry, known = settings.kafka, settings.schema_registry, variables()
    if "bootstrap_servers" not in kafka.model_fields_set and known.get("KAFKA"):
        kafka = kafka.model_copy(update={"bootstrap_servers": known["KAFKA"]})
    # The registry of the dev cluster belongs to its Kafka only.
    beside = known if kafka.bootstrap_servers == known.get("KAFKA") else os.environ
    if "url" not in registry.model_fields_set and beside.get("SCHEMA_REGISTRY_URL"):
        registry = registry.model_copy(update={"url": beside["SCHEMA_REGISTRY_URL"]})
    found = settings.model_copy(update={"kafka": kafka, "schema_registry": registry})
    if "schema_registry" not in settings.model_fields_set:
        found.model_fields_set.discard("schema_registry")  # a registry in the file is one that must answer
    return found


def _dev_cluster() -> dict[str, str]:
    """Return the variables of the dev cluster of this folder, empty when none is up."""
    try:
        found = json.loads(ENDPOINTS.read_text())
        os.kill(found["kafka"]["brokers"][0]["pid"], 0)
        return environment(found)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
