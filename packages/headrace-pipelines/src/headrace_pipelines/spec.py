"""The pipeline file: the sources that are read, the queries over them, and where the rows go.

name: delays
sources:
  flights: {topic: flights, schema: "carrier STRING, hour STRING, arr_delay DOUBLE"}
flows:
  delays_by_hour:
    sql: SELECT carrier, hour, count(*) AS flights FROM flights GROUP BY carrier, hour
    sink: {topic: flights.delays, key: "concat(carrier, '|', hour)"}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.kafka import BootstrapServers, KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.section import Count, PositiveSeconds, Seconds, Section, TopicName
from headrace.config.topic_names import external_topic
from headrace.errors import PipelineInvalid
from headrace_pipelines.sinks.sink_kinds import AnySink
from headrace_pipelines.sinks.topic_sink import KafkaSink
from headrace_pipelines.sources import (
    CORRUPT_FLOW,
    CORRUPT_RECORDS,
    AnySource,
    ColumnName,
    FunctionName,
    KafkaSource,
    Options,
)

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
"""Name of a pipeline or flow; it becomes part of group names and folders."""
TableName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
"""Name of a source or view, as SQL writes it without quotes."""
Sql = Annotated[str, Field(min_length=1)]
_INTERVAL_SECONDS = 0.5


class TriggerSpec(Section):
    """When the flows look for new records."""

    internal: ClassVar = frozenset(("checkpoint_seconds",))

    interval_seconds: Seconds = _INTERVAL_SECONDS
    """Pause between the beginnings of two micro-batches; 0 begins the next one at once and uses a core for it."""
    once: bool = False
    """Read all present records, then end; the next run continues from the checkpoint."""
    realtime: bool = False
    """Process each record at once, by Spark's real-time mode: Kafka to Kafka, by SQL only. It needs a core for each
    partition."""
    checkpoint_seconds: Annotated[float, Field(ge=5)] = 60.0
    """With `realtime`: time between two checkpoints. After a crash the rows of this time are written again, or read
    again with `delivery: exactly_once`. A pause of half a second at each stays below 1 % of it, so p99 is the delay
    between two checkpoints."""
    max_records: Count = 250_000
    """Records that one micro-batch takes from one source at most."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        timed = self.interval_seconds != _INTERVAL_SECONDS
        given = {"once": self.once, "realtime": self.realtime, "interval_seconds": timed}
        chosen = [name for name, is_set in given.items() if is_set]
        if len(chosen) > 1:
            raise ValueError(f"has both {' and '.join(chosen)}: keep one of them")
        return self


_CODE = ("handler", "processor")
"""Queries of a flow that are Python code which gets records one by one."""


class QuerySpec(Section):
    """Where rows come from: one of SQL, a Python function and, in a flow, a handler."""

    sql: Sql | None = None
    """SELECT over sources and views."""
    sql_file: Annotated[str, Field(min_length=1)] | None = None
    """File that holds the SELECT, relative to the pipeline file."""
    python: FunctionName | None = None
    """`module:function`: a function that takes the DataFrames of `reads` and returns one. The module is a file in the
    folder of the pipeline file, or installed."""
    reads: list[TableName] = []
    """Sources and views that the function takes, in order."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        kinds = [name for name in ("sql", "sql_file", "python", *_CODE) if getattr(self, name, None)]
        if len(kinds) != 1:
            text = f"has {' and '.join(kinds) or 'no query'}"
            raise ValueError(f"{text}: write one of sql, sql_file, python, handler and processor")
        if kinds[0] in _CODE:
            if len(self.reads) != 1:
                raise ValueError(f"{kinds[0]} needs reads with one name: the source or view whose records it gets")
        elif bool(self.python) != bool(self.reads):
            what = "sources and views that the function takes" if self.python else "reads is for python: remove it"
            raise ValueError(what if self.reads else f"python needs reads, the {what}")
        return self


class RuleSpec(Section):
    """A check for each row of a flow. A row for which it is null breaks the rule."""

    check: Sql
    """SQL expression over the flow's columns, true for good rows."""
    otherwise: Literal["count", "drop", "quarantine", "fail"] = "count"
    """What happens to a row for which it is not: it is counted in any case. `quarantine` writes it to the dead letter
    topic instead; `fail` stops the flow."""


class LateRowsSpec(Section):
    """Rows that arrive after the watermark of their source has passed them: they go to a topic and are counted exactly.

    The flow's SQL then needs no `WATERMARK` for this source. A row is late even if its window is still open.
    """

    source: TableName
    """Source that the watermark is for; the flow reads it."""
    column: ColumnName
    """Its column with the time of the event."""
    delay_seconds: Seconds
    """The watermark is this much before the newest time that was seen."""
    topic: Annotated[TopicName, AfterValidator(external_topic)]
    """Topic of late rows, as JSON objects."""


def _as_section(value: Any) -> Any:
    return {"sql": value} if isinstance(value, str) else value


ViewSpec = Annotated[QuerySpec, BeforeValidator(_as_section, json_schema_input_type=str | QuerySpec)]
"""A query with a name; a text is its SQL."""


class FlowSpec(QuerySpec):
    """One query that runs on its own: a streaming query of Spark with its own checkpoint."""

    handler: Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|.+\.ya?ml)$")] | None = None
    """Handler of a function, `module:function` in the folder of the pipeline file, or the path of a function.yaml. It
    gets each record of `reads`, and writes none, one or several."""
    processor: FunctionName | None = None
    """Stateful processor, `module:Class` in the folder of the pipeline file. It gets each row of `reads` with the state
    of its key, and writes none, one or several."""
    key: ColumnName | None = None
    """With `processor`: the column of `reads` whose values each have their own state and timers."""
    initial: TableName | None = None
    """With `processor`: table, or view of tables, with rows for `init_state`. They have the column of `key` too, and
    are read when the flow starts without a checkpoint."""
    sink: AnySink
    """The target of its rows."""
    on_error: Literal["dead_letter", "drop", "fail"] = "dead_letter"
    """What happens to a record that the handler or processor fails for, and to a row that does not fit the schema of
    the sink: it goes to the dead letter topic, it is dropped and counted, or it stops the flow."""
    attempts: Count = 1
    """Calls of the handler or processor for a record before that, one after the other."""
    rules: dict[Name, RuleSpec] = {}
    """Quality rules by name."""
    late_rows: LateRowsSpec | None = None
    """What happens to late rows. Without it, Spark drops those that belong to no open window or state."""
    dead_letter_topic: TopicName | None = None
    """Dead letter topic of rows that break a rule, and of failed records; `<sink.topic>.dlq` when absent."""

    @property
    def quarantines(self) -> bool:
        """Whether a rule puts rows in quarantine."""
        return any(rule.otherwise == "quarantine" for rule in self.rules.values())

    @property
    def dead_letters(self) -> str | None:
        """The dead letter topic, None if nothing needs it."""
        can_fail = self.handler or self.processor or self.sink.can_reject_rows
        if not (self.quarantines or (can_fail and self.on_error == "dead_letter")) or not self.sink.topics:
            return None
        return self.dead_letter_topic or f"{self.sink.topics[0]}.dlq"


_OF_OTHERS = {
    "spark.app.name": "name",
    "spark.master": "driver.master",
    "spark.driver.memory": "driver.heap_bytes",
    "spark.sql.shuffle.partitions": "driver.shuffle_partitions",
}
_MAY_BE_SECRET = re.compile(r"(?i)secret|password|token|credential|access\.?key")


def _check_settings(settings: Options) -> Options:
    for name in settings:
        if not name.startswith("spark."):
            raise ValueError(f"{name} is not a setting of Spark; their names begin with `spark.`")
        if name in _OF_OTHERS:
            raise ValueError(f"{name} is set by {_OF_OTHERS[name]}: write that instead")
        if _MAY_BE_SECRET.search(name):
            raise ValueError(f"{name} may hold a secret, which process lists would show: give it to Spark by a file")
    return settings


def _check_remote(remote: Any) -> Any:
    parameters = {each.partition("=")[0] for each in str(remote).split(";")[1:] if each}
    if parameters - {"use_ssl", "user_id"} or "@" in str(remote):
        text = "has more than host, port, use_ssl and user_id, which may be a login that plans show: remove it"
        raise ValueError(f"{text}, and set the variable SPARK_CONNECT_AUTHENTICATE_TOKEN for a token")
    return remote


class DriverSpec(Section):
    """The resources of the Spark driver process, and the cluster whose executors work for it."""

    internal: ClassVar = frozenset(("stall_seconds",))

    master: Annotated[str, Field(pattern=r"^(local(\[.+\])?|spark://.+|yarn|k8s://.+)$")] | None = None
    """Master of the cluster: `spark://host:port`, `yarn` or `k8s://...`. When absent, all tasks run in the driver. The
    folder of the pipeline file and `state_dir` must have the same path on all nodes, and `headrace` be installed."""
    remote: Annotated[str, Field(pattern=r"^sc://[^/;]+(/;.*)?$"), BeforeValidator(_check_remote)] | None = None
    """Spark Connect server that runs the flows, `sc://host:port`; the driver is a client of it, without a JVM. The
    folder of the pipeline file and `state_dir` must have the same path there."""
    settings: Annotated[Options, AfterValidator(_check_settings)] = {}
    """Further settings of Spark, by its names, such as `spark.executor.memory`."""
    python_files: list[str] = []
    """Python files, zips or wheels for all executors, relative to the pipeline file. Those in its folder are sent in
    any case."""
    heap_bytes: Annotated[int, Field(ge=536_870_912)] = 1_073_741_824
    """Java heap of the process, in which all flows of the pipeline run."""
    cores: Count | None = None
    """Tasks that run at the same time; all cores of the machine or of the cluster when absent."""
    shuffle_partitions: Count = 2
    """Parts into which aggregates and joins are split, and tasks that write a sink with `scope: task`. It cannot change
    while a flow that needs it has a checkpoint."""
    stall_seconds: PositiveSeconds = 300.0
    """A flow that completes no micro-batch and no task in this time is reported in readiness; after twice the time
    its driver is replaced."""

    @property
    def on_cluster(self) -> bool:
        """Whether tasks run in other processes than the driver."""
        return bool(self.remote) or not (self.master or "local").startswith("local")


class PipelineKafka(Section):
    """Brokers and login of one pipeline, instead of those in `headrace.yaml`. References work here as they do there."""

    bootstrap_servers: BootstrapServers | None = None
    """Brokers to ask first: `host:port`, comma separated; those of `headrace.yaml` when absent."""
    security: KafkaSecurity | None = None
    """TLS and login. When absent, those of `headrace.yaml` for its brokers. Other brokers then have none, and must have
    it written, as `protocol: plaintext`, if `headrace.yaml` has TLS or a login."""


class PipelineSpec(Section):
    """A whole pipeline file."""

    internal: ClassVar = frozenset(("folder",))

    name: Name
    """Name of the pipeline; its state and the groups `headrace.<pipeline>.<flow>` are found by it."""
    kafka: PipelineKafka = PipelineKafka()
    """Brokers and login, if they are not those of `headrace.yaml`."""
    trigger: TriggerSpec = TriggerSpec()
    """When the flows look for new records."""
    sources: Annotated[dict[TableName, AnySource], Field(min_length=1)]
    """What is read, by the name SQL knows it by."""
    views: dict[TableName, ViewSpec] = {}
    """Queries with a name, for use in other views and in flows: SQL, or a section as a flow's query."""
    flows: Annotated[dict[Name, FlowSpec], Field(min_length=1)]
    """Queries that run, by name."""
    folder: Path | None = None
    """Folder of Python modules, SQL files and relative paths; that of the pipeline file when absent."""
    driver: DriverSpec = DriverSpec()
    """The resources of the Spark driver process."""

    @property
    def running(self) -> dict[str, FlowSpec]:
        """All flows by name: those of the file, and one for each source that puts its corrupt records in quarantine."""
        found = dict(self.flows)
        once = any(flow.sink.transaction_scope for flow in self.flows.values())
        for name, source in self.sources.items():
            if isinstance(source, KafkaSource) and source.corrupt == "quarantine":
                query = f"SELECT key, value, headers FROM {name}{CORRUPT_RECORDS}"
                # Not validated: only Headrace may write to a dead letter topic.
                sink = KafkaSink.model_construct(
                    topic=source.dead_letters,
                    value_format="record",
                    mode="update" if self.trigger.realtime else "append",  # real-time mode has no other
                    delivery="exactly_once" if once else "at_least_once",
                )
                found[name + CORRUPT_FLOW] = FlowSpec.model_construct(sql=query, sink=sink)
        return found

    @property
    def transactions(self) -> set[str]:
        """Scopes of the transactions in which flows write to Kafka; empty without any."""
        return {scope for flow in self.running.values() if (scope := flow.sink.transaction_scope)}

    @property
    def uses_registry(self) -> bool:
        """Whether its driver may need the schema registry."""
        parts = [*self.sources.values(), *(flow.sink for flow in self.flows.values()), *self.flows.values()]
        return any(getattr(part, "value_format", "") in SCHEMA_TYPES or getattr(part, "handler", "") for part in parts)

    def group(self, flow: str) -> str:
        """Return the consumer group that shows how far a flow has come."""
        return f"headrace.{self.name}.{flow}"

    def cluster(self, kafka: KafkaConfig) -> KafkaConfig:
        """Return how to reach Kafka: `kafka` itself, if the file says nothing of it.

        Raises:
            PipelineInvalid: Its own brokers would be reached in plain text by an omission.
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
                f"{protocol}, which is not inherited: write kafka.security, with protocol: plaintext for plain text"
            )
        return kafka.model_copy(update={"bootstrap_servers": servers or kafka.bootstrap_servers, "security": own})
