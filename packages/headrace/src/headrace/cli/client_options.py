"""`-X name=value`: properties of Kafka's client for one command, by the list of `kafka.properties`."""

from collections.abc import Sequence
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from headrace.cli.cluster_options import ClusterSettings
from headrace.cli.options import PAIR
from headrace.config.kafka import ClientProperties
from headrace.config.producer_config import ProducerConfig
from headrace.errors import ConfigError
from headrace.kafka.client.properties import check_properties

property_option = click.option(
    "-X", "properties", multiple=True, type=PAIR, help="Property of Kafka's client, such as compression.type=zstd."
)
_VALIDATE = TypeAdapter(ClientProperties).validate_python


def with_properties(cluster: ClusterSettings, pairs: Sequence[tuple[str, str]]) -> ClusterSettings:
    """Return the settings with properties of a consumer.

    Raises:
        click.UsageError: A property is not accepted, or has a wrong value.
    """
    found = _checked(lambda: _VALIDATE(dict(pairs)))
    kafka = cluster.kafka.model_copy(update={"properties": {**cluster.kafka.properties, **found}})
    if pairs:
        _checked(lambda: check_properties(kafka, ProducerConfig()))
    return cluster._replace(kafka=kafka)


def producer_of(cluster: ClusterSettings, pairs: Sequence[tuple[str, str]]) -> ProducerConfig:
    """Return the settings of a producer with these properties; raises as `with_properties`."""
    found: ProducerConfig = _checked(lambda: ProducerConfig.model_validate({"properties": dict(pairs)}))
    if pairs:
        _checked(lambda: check_properties(cluster.kafka, found))
    return found


def _checked(make: Any) -> Any:
    try:
        return make()
    except ValidationError as cause:
        error = cause.errors()[0]
        names = [str(part) for part in error["loc"] if part not in ("properties", "[key]")]
        text = error["msg"].removeprefix("Value error, ")
        raise click.UsageError(f"-X {' '.join([*names, text])}") from None
    except ConfigError as cause:
        raise click.UsageError(f"-X: {cause.description}") from None
