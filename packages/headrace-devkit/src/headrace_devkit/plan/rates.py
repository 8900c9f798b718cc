"""The rates file of `headrace plan`: how many records each consumer gets, and what the processes are."""

from pathlib import Path

import msgspec
import yaml

from headrace.errors import ConfigError


class ConsumerRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load of a reactive consumer."""

    records_per_second: float
    partitions: int
    backend_seconds: float = 0.02
    """How long the backend takes for a delivery."""
    record_bytes: int = 500
    largest_key: float = 0.0
    """Part of the records with the most frequent key, 0 to 1."""
    largest_partition: float = 0.0
    """Part of the records in the largest partition, 0 to 1; by default the same for all partitions."""


class PipelineRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load of a pipeline."""

    records_per_second: float
    partitions: int


class ProcessRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processes, and what they cost on your machine; `python -m bench.plan_error` measures that."""

    count: int = 0
    """0: as many as are needed."""
    zones: int = 1
    cores: float = 1.0
    """Of each; Headrace uses little more than one."""
    copies: int = 2
    """Processes of each consumer."""
    record_microseconds: float = 2.4
    """Processor time for a record in a large delivery."""
    delivery_microseconds: float = 22.4
    """Processor time for each delivery."""
    fetch_microseconds: float = 150.0
    """Processor time for each response of Kafka with records."""
    partition_microseconds: float = 2.2
    """Processor time for each partition in a request to Kafka; the client names all of its partitions each time."""
    process_millicores: float = 10.0
    """At rest."""
    consumer_millicores: float = 1.5
    """Of one more consumer at rest."""
    process_threads: float = 30.0
    process_megabytes: float = 90.0
    """Under load."""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    consumers: dict[str, ConsumerRate] = {}
    pipelines: dict[str, PipelineRate] = {}
    processes: ProcessRates = ProcessRates()


def read_rates(path: Path) -> Rates:
    """Return the rates of a file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        rates = msgspec.convert(yaml.safe_load(path.read_text()), Rates)
    except (OSError, ValueError, yaml.YAMLError) as cause:
        text = f"{path}: {cause}: write consumers by name, each with records_per_second and partitions"
        raise ConfigError(text) from cause
    limits = {
        f"{name}.{key}": value
        for name, one in rates.consumers.items()
        for key, value in (("largest_key", one.largest_key), ("largest_partition", one.largest_partition))
    }
    if wrong := next((name for name, value in limits.items() if not 0 <= value <= 1), None):
        raise ConfigError(f"{path}: consumers.{wrong} is not from 0 to 1: write the part of the records")
    return rates
