"""The pipeline file: which topics are read, what SQL makes of them, and where the rows go.

name: delays
sources:
  flights: {topic: flights, schema: "carrier STRING, hour STRING, arr_delay DOUBLE"}
flows:
  delays_by_hour:
    sql: SELECT carrier, hour, count(*) AS flights FROM flights GROUP BY carrier, hour
    sink: {topic: flights.delays, key: "concat(carrier, '|', hour)"}
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from headrace.config.internal_topics import external_topic
from headrace.config.kafka import BootstrapServers, KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.section import Count, Seconds, Section, TopicName
from headrace.errors import PipelineInvalid

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
"""Name of a pipeline or flow; it becomes part of group names and folders."""
TableName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
"""Name of a source or view, as SQL writes it without quotes."""
ColumnName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Sql = Annotated[str, Field(min_length=1)]
_INTERVAL_SECONDS = 0.5


class TriggerSpec(Section):
    """When the flows look for new records."""

    interval_seconds: Seconds = _INTERVAL_SECONDS
    """Pause between the beginnings of two micro-batches; 0 begins the next one at once and uses a core for it."""
    once: bool = False
    """Read all present records, then end; the next run continues from the checkpoint."""
    max_records: Count = 250_000
    """Records that one micro-batch takes from one source at most."""

    @model_validator(mode="after")
    def _one_of_two(self) -> TriggerSpec:
        if self.once and self.interval_seconds != _INTERVAL_SECONDS:
            raise ValueError("has both once and interval_seconds: keep one of them")
        return self


class SourceSpec(Section):
    """One Kafka topic as a table of rows that never ends.

    A value that is not one JSON object, or in which a field is not of its declared type, is no row: it is left out
    and counted. A field that is absent is null; fields that the schema does not name are not read.
    """

    model_config = ConfigDict(serialize_by_alias=True, validate_by_alias=True, validate_by_name=True)

    topic: TopicName
    """Topic to read; records of aborted transactions are not seen."""
    value_format: Literal["json"] = "json"
    """Format of the values."""
    value_schema: Annotated[str, Field(alias="schema", min_length=1)]
    """Columns and their types as in SQL's CREATE TABLE: `carrier STRING, arr_delay DOUBLE`."""
    key_column: ColumnName | None = None
    """Name of a further column that holds the record's key as text."""
    timestamp_column: ColumnName | None = None
    """Name of a further column that holds the record's timestamp."""
    starting: Literal["earliest", "latest"] = "earliest"
    """The start of a flow that has no checkpoint yet."""


class SinkSpec(Section):
    """The topic a flow writes to: each row is one record, its value a JSON object of all columns."""

    topic: Annotated[TopicName, AfterValidator(external_topic)]
    """Topic to write; created like the first topic the flow reads if it does not exist."""
    key: Annotated[str, Field(min_length=1)] | None = None
    """SQL expression over the flow's columns; its value as text is the record's key. Without it keys are null."""
    mode: Literal["append", "update", "complete"] = "update"
    """Spark's output mode: `update` writes an aggregate's row whenever it changed, so the newest row per key counts;
    `append` writes it once, when a watermark has passed it; `complete` writes all rows every time."""


class FlowSpec(Section):
    """One query that runs on its own: a streaming query of Spark with its own checkpoint."""

    sql: Sql
    """SELECT over sources and views."""
    sink: SinkSpec
    """The target of its rows."""


class DriverSpec(Section):
    """The resources of the Spark driver process."""

    heap_bytes: Annotated[int, Field(ge=536_870_912)] = 1_073_741_824
    """Java heap of the process, in which all flows of the pipeline run."""
    cores: Count | None = None
    """Tasks that run at the same time; the machine's cores when absent."""
    shuffle_partitions: Count = 2
    """Parts into which aggregates and joins are split. A flow with a checkpoint keeps the number it began with."""


class PipelineKafka(Section):
    """Brokers and login of one pipeline, instead of those in `headrace.yaml`. References work here as they do there."""

    bootstrap_servers: BootstrapServers | None = None
    """Brokers to ask first: `host:port`, comma separated; those of `headrace.yaml` when absent."""
    security: KafkaSecurity | None = None
    """TLS and login. When absent, those of `headrace.yaml` for its brokers. Other brokers then have none, and must have
    it written, as `protocol: plaintext`, if `headrace.yaml` has TLS or a login."""


class PipelineSpec(Section):
    """A whole pipeline file."""

    name: Name
    """Name of the pipeline; its state and the groups `headrace.<pipeline>.<flow>` are found by it."""
    kafka: PipelineKafka = PipelineKafka()
    """Brokers and login, if they are not those of `headrace.yaml`."""
    trigger: TriggerSpec = TriggerSpec()
    """When the flows look for new records."""
    sources: Annotated[dict[TableName, SourceSpec], Field(min_length=1)]
    """Topics to read, by the name SQL knows them by."""
    views: dict[TableName, Sql] = Field(default_factory=dict)
    """Queries with a name, for use in other views and in flows."""
    flows: Annotated[dict[Name, FlowSpec], Field(min_length=1)]
    """Queries that run, by name."""
    driver: DriverSpec = DriverSpec()
    """The resources of the Spark driver process."""

    def group(self, flow: str) -> str:
        """Return the consumer group that shows how far a flow has come."""
        return f"headrace.{self.name}.{flow}"

    def cluster(self, kafka: KafkaConfig) -> KafkaConfig:
        """Return how to reach Kafka: `kafka` itself, if the file says nothing of it.

        Raises:
            PipelineInvalid: Brokers of its own would be reached in plain text by an omission.
        """
        servers, security = self.kafka.bootstrap_servers, self.kafka.security
        other_brokers = servers is not None and not kafka.is_at(servers.split(","))
        if not other_brokers and security is None:
            return kafka
        # Brokers of another cluster never get a login that is not for them.
        own, protocol = security or KafkaSecurity(), kafka.security.effective_protocol
        if own == KafkaSecurity() and protocol != "plaintext":
            raise PipelineInvalid(
                f"pipeline {self.name}: kafka has neither TLS nor a login, while headrace.yaml reaches its brokers by "
                f"{protocol}, which is not taken over: write kafka.security, with protocol: plaintext for plain text"
            )
        return kafka.model_copy(update={"bootstrap_servers": servers or kafka.bootstrap_servers, "security": own})
