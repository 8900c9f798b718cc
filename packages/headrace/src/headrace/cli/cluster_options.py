"""Configuration of commands that use Kafka: the addresses of Kafka and the registry, and a producer.

The file is `./headrace.yaml` by default. Addresses are taken from an option, the file, the environment (`KAFKA`,
`SCHEMA_REGISTRY_URL`) or the running dev cluster of this folder, in this order. The default is localhost. References
of the file to these variables also find the dev cluster.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from headrace.cli.global_options import RESULT_FORMATS, uses, value_of
from headrace.config.dev_endpoints import ENDPOINTS, environment
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig, check_servers
from headrace.config.producer_config import ProducerConfig
from headrace.errors import ConfigError
from headrace.kafka import Admin, Producer
from headrace.runtime import Deadline, SystemClock

if TYPE_CHECKING:  # without a file, its models are not needed, and take longer than all else
    from headrace.config.model import HeadraceConfig
    from headrace.config.yaml_tree import KeyPath

DEFAULT_FILE = Path("headrace.yaml")


class ClusterSettings(NamedTuple):
    """How to connect to the cluster, and the whole file if the command reads one."""

    kafka: KafkaConfig
    registry: SchemaRegistryConfig
    file: "HeadraceConfig | None"


def kafka_options(
    command: Callable[..., Any],
    only: Collection[str] = (),
    *,
    registry: bool = False,
    formats: Sequence[str] = RESULT_FORMATS,
) -> Callable[..., Any]:
    """Have a command, which may be a coroutine function, use the options for Kafka; it gets `cluster` and `output`.

    With `only`, it reads these sections of the file, and gets no `file`. With `registry`, it uses `--schema-registry`.
    """

    @functools.wraps(command)
    def run(
        bootstrap_servers: str | None, config: Path | None, schema_registry: str | None = None, **others: Any
    ) -> Any:
        found = command(cluster=find_cluster(bootstrap_servers, config, schema_registry, only), **others)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    names = ("bootstrap_servers", "config", "output", *(("schema_registry",) if registry else ()))
    return uses(*names, formats=formats)(run)


connection_options = functools.partial(kafka_options, only=("kafka", "schema_registry"))
"""The same for a command that needs nothing else of the file: problems in other sections do not stop it."""
registry_options = functools.partial(kafka_options, registry=True)
"""The same for a command that uses `--schema-registry`, too."""


def find_cluster(
    bootstrap_servers: str | None, config: Path | None, registry_url: str | None = None, only: Collection[str] = ()
) -> ClusterSettings:
    """Return how to connect to Kafka and the registry.

    Raises:
        ConfigError: The file is not valid.
    """
    quiet_client()
    Admin.on_wait = functools.partial(click.echo, err=True)
    # With -b alone, the file of the folder may describe another cluster.
    file = find_settings(config, only) if config or not bootstrap_servers else None
    if file:
        kafka, registry = file.kafka, file.schema_registry
    else:
        kafka, registry = _with_addresses(KafkaConfig(), SchemaRegistryConfig())
    if bootstrap_servers:
        kafka = _at(kafka, bootstrap_servers, "--bootstrap-servers")
    if registry_url:
        registry = registry.model_copy(update={"url": registry_url})
    return ClusterSettings(kafka, registry, None if only else file)


def _at(kafka: KafkaConfig, servers: str, source: str) -> KafkaConfig:
    try:
        return kafka.model_copy(update={"bootstrap_servers": check_servers(servers)})
    except ValueError as cause:
        raise ConfigError(f"{source} {cause}") from None


def find_settings(file: Path | None, only: Collection[str] = ()) -> "HeadraceConfig | None":
    """Return the settings of a file, by default of `./headrace.yaml`; None if that does not exist.

    Raises:
        ConfigError: The file is not valid.
    """
    if file is None and not DEFAULT_FILE.exists():
        return None
    return load_settings(file or DEFAULT_FILE, only)


def load_settings(file: Path | None, only: Collection[str] = ()) -> "HeadraceConfig":
    """Return what a file and the environment set, with standing queries as reactive consumers.

    Raises:
        ConfigError: The file is not valid.
    """
    from headrace.config.load import load_config
    from headrace.consumers.feature_checks import completed

    return completed(with_environment(load_config(file, variables(), only, _problems_of_sections)))


def _problems_of_sections(settings: "HeadraceConfig") -> "Iterable[tuple[KeyPath, str]]":
    from headrace.consumers.feature_checks import feature_checks

    return [problem for checks in feature_checks() for problem in checks.problems(settings)]


def with_environment(settings: "HeadraceConfig") -> "HeadraceConfig":
    """Return settings with the addresses of the environment unless the file sets them."""
    kafka, registry = _with_addresses(settings.kafka, settings.schema_registry)
    found = settings.model_copy(update={"kafka": kafka, "schema_registry": registry})
    if "schema_registry" not in settings.model_fields_set:
        found.model_fields_set.discard("schema_registry")  # only a registry in the file must be reachable
    return found


def _with_addresses(kafka: KafkaConfig, registry: SchemaRegistryConfig) -> tuple[KafkaConfig, SchemaRegistryConfig]:
    known = variables()
    if "bootstrap_servers" not in kafka.model_fields_set and known.get("KAFKA"):
        kafka = _at(kafka, known["KAFKA"], "the environment variable KAFKA")
    # The registry of the dev cluster belongs to its Kafka only.
    urls = known if kafka.bootstrap_servers == known.get("KAFKA") else os.environ
    if "url" not in registry.model_fields_set and urls.get("SCHEMA_REGISTRY_URL"):
        registry = registry.model_copy(update={"url": urls["SCHEMA_REGISTRY_URL"]})
    return kafka, registry


def variables() -> dict[str, str]:
    """Return the environment, with the variables of a running dev cluster that it does not set."""
    try:
        found = json.loads(ENDPOINTS.read_text())
        os.kill(found["kafka"]["brokers"][0]["pid"], 0)
        return {**environment(found), **os.environ}
    except (OSError, ValueError, LookupError, TypeError):
        return dict(os.environ)


@contextlib.asynccontextmanager
async def open_producer(kafka: KafkaConfig, settings: ProducerConfig | None = None) -> AsyncIterator[Producer]:
    """Provide a producer for a command; on exit, wait up to 5 s for what is in flight."""
    producer = Producer(kafka, settings or ProducerConfig(), "cli")
    await producer.start()
    try:
        yield producer
        await producer.drain(Deadline(SystemClock(), 5.0))
    finally:
        await producer.stop()


def quiet_client() -> None:
    """Keep the Kafka client's log off the terminal, because problems are printed as one error."""
    if not value_of("debug"):
        logging.getLogger("headrace.kafka.librdkafka").setLevel(logging.CRITICAL)
