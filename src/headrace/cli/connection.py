"""Where commands find Kafka and the schema registry.

Order: option, file, environment (`KAFKA`, `SCHEMA_REGISTRY_URL`), the dev cluster if it is up, localhost.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.output import output_option
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.devcluster import HOME
from headrace.kafka import Producer
from headrace.lifecycle import Deadline, SystemClock

ENDPOINTS = HOME / "endpoints.json"

registry_option = click.option(
    "--schema-registry", "registry", metavar="URL", help="Schema registry, for formats that need one."
)


class Place(NamedTuple):
    """Where the cluster is, and the whole file if one was named."""

    kafka: KafkaConfig
    registry: SchemaRegistryConfig
    file: HeadraceConfig | None


def kafka_options(command: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., Any]:
    """Make a command of a coroutine function, with `-b`, `-c` and `--output`; it gets `place` and `output`.

    `registry_option` goes below it.
    """

    @functools.wraps(command)
    def run(bootstrap_servers: str | None, config: Path | None, registry: str | None = None, **others: Any) -> Any:
        return asyncio.run(command(place=find(bootstrap_servers, config, registry), **others))

    servers = click.option("-b", "--bootstrap-servers", help="Kafka: host:port, comma separated.")
    file = click.option(
        "-c", "--config", "config", type=click.Path(path_type=Path), help="A headrace.yaml to take settings from."
    )
    return servers(file(output_option(run)))


def find(bootstrap_servers: str | None, config: Path | None, registry_url: str | None = None) -> Place:
    """Return where Kafka and the registry are.

    Raises:
        ConfigError: The file is not usable.
    """
    quiet_client()
    file = load_config(config, os.environ) if config else None
    kafka = file.kafka if file else KafkaConfig()
    registry = file.schema_registry if file else SchemaRegistryConfig()
    running = _dev_cluster()
    servers = bootstrap_servers or (not file and (os.environ.get("KAFKA") or running.get("kafka")))
    url = registry_url or (not file and (os.environ.get("SCHEMA_REGISTRY_URL") or running.get("schema_registry")))
    if servers:
        kafka = kafka.model_copy(update={"bootstrap_servers": servers})
    if url:
        registry = registry.model_copy(update={"url": url})
    return Place(kafka, registry, file)


@contextlib.asynccontextmanager
async def open_producer(kafka: KafkaConfig) -> AsyncIterator[Producer]:
    """Give a producer for the length of a command; on leaving it waits for what is in flight, at most 5 s."""
    producer = Producer(kafka, ProducerConfig(), "cli")
    await producer.start()
    try:
        yield producer
        await producer.drain(Deadline(SystemClock(), 5.0))
    finally:
        await producer.stop()


def quiet_client() -> None:
    """Keep the Kafka client's own log off the terminal: what goes wrong comes out as an error, once."""
    if not click.get_current_context().find_root().params.get("debug"):
        logging.getLogger("headrace.kafka.client").setLevel(logging.CRITICAL)


def _dev_cluster() -> dict[str, str]:
    """Return the endpoints of the dev cluster of this folder, empty when none is up."""
    try:
        found = json.loads(ENDPOINTS.read_text())
        os.kill(found["kafka"]["brokers"][0]["pid"], 0)
        registry = found.get("schema_registry") or {}
        return {"kafka": found["kafka"]["bootstrap_servers"], "schema_registry": registry.get("url", "")}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
