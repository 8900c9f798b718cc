"""The rates file of `headrace plan`: how many records each consumer gets, and what the processes are."""

from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from headrace.errors import ConfigError

_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Partitions = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class ConsumerRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load of a reactive consumer."""

    records_per_second: _Amount
    partitions: _Partitions
    backend_seconds: _Amount = 0.02
    """How long the backend takes for a delivery."""
    record_bytes: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 500
    largest_key: _Part = 0.0
    """Part of the records with the most frequent key, 0 to 1."""
    largest_partition: _Part = 0.0
    """Part of the records in the largest partition, 0 to 1; by default the same for all partitions."""


class PipelineRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load of a pipeline."""

    records_per_second: _Amount
    partitions: _Partitions


class ProcessRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processes, and what they cost on your machine; `python -m bench.plan_error` measures that."""

    count: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    """0: as many as are needed."""
    zones: _Count = 1
    cores: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    """Of each; Headrace uses little more than one."""
    copies: _Count = 2
    """Processes of each consumer."""
    record_microseconds: _Amount = 2.4
    """Processor time for a record in a large delivery."""
    delivery_microseconds: _Amount = 20.0
    """Processor time for a delivery, where one follows the other."""
    partition_microseconds: _Amount = 0.4
    """Processor time for each partition in a request to Kafka; the client names all of its partitions each time."""
    fetch_microseconds: _Amount = 1800.0
    """Processor time to wake up for records of Kafka: two threads, whose code and data other work has displaced."""
    reply_microseconds: _Amount = 400.0
    """Processor time to wake up for a backend's response."""
    process_millicores: _Amount = 5.0
    """At rest."""
    consumer_millicores: _Amount = 2.3
    """Of one more consumer at rest."""
    process_threads: _Amount = 38.0
    """Under load."""
    process_megabytes: _Amount = 55.0
    """Without consumers."""


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
        return msgspec.convert(yaml.safe_load(path.read_text()), Rates)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as cause:
        text = f"{path}: {cause}: write consumers by name, each with records_per_second and partitions"
        raise ConfigError(text) from cause
