"""Commands that speak to Kafka: their options, where Kafka and the schema registry are, and a producer."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.output import output_option
from headrace.cli.settings import config_option, find_settings, located
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka import Admin, Producer
from headrace.lifecycle import Deadline, SystemClock

registry_option = click.option(
    "--schema-registry", "registry", metavar="URL", help="Schema registry, for formats that need one."
)


class Place(NamedTuple):
    """Where the cluster is, and the whole file if there is one."""

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
    return servers(config_option(output_option(run)))


def find(bootstrap_servers: str | None, config: Path | None, registry_url: str | None = None) -> Place:
    """Return where Kafka and the registry are.

    Raises:
        ConfigError: The file is not usable.
    """
    quiet_client()
    Admin.on_wait = functools.partial(click.echo, err=True)
    # With -b alone the file of the folder is about another cluster, or about none.
    file = find_settings(config) if config or not bootstrap_servers else None
    settings = file or located(HeadraceConfig())
    kafka, registry = settings.kafka, settings.schema_registry
    if bootstrap_servers:
        kafka = kafka.model_copy(update={"bootstrap_servers": bootstrap_servers})
    if registry_url:
        registry = registry.model_copy(update={"url": registry_url})
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
