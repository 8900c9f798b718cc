"""The model of `headrace.yaml`: the source of parsing, checks, JSON Schema and the reference page."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headrace.config.active import ActiveConsumersConfig
from headrace.config.administration import HealthConfig
from headrace.config.audit_config import AuditConfig
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.http import HttpConfig, SecurityConfig
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.config.placement_config import PlacementConfig
from headrace.config.producer_config import ProducerConfig
from headrace.config.registrations import RegistrationsConfig
from headrace.config.section import Number, PositiveSeconds, Section, TopicName

C = TypeVar("C", bound="HeadraceConfig")


class ControlConfig(Section):
    """Runtime control: pauses, seeks, skips, changed settings, jobs, registrations."""

    topic: TopicName = "_headrace-control"
    """Compacted topic with all of this. Processes that share it are one deployment."""


class HeadraceConfig(Section):
    """The whole file, apart from the keys that features of other packages add."""

    internal: ClassVar = frozenset(("functions_reload",))
    one_process: ClassVar[frozenset[str]] = frozenset()
    """Keys of a feature that need one process for the port."""
    first_process: ClassVar[frozenset[str]] = frozenset()
    """Keys of a feature that the first of several processes serves for all."""

    @property
    def foreign_dead_letters(self) -> Mapping[str, Sequence[str]]:
        """Dead letter topics that other products write, and the topics each has dead letters of; features add them."""
        return {}

    kafka: KafkaConfig = KafkaConfig()
    """Connection to Kafka."""
    schema_registry: SchemaRegistryConfig = SchemaRegistryConfig()
    """Connection to the schema registry."""
    security: SecurityConfig = SecurityConfig()
    """Who may do what over HTTP."""
    http: HttpConfig = HttpConfig()
    """The HTTP listener."""
    producer: ProducerConfig = ProducerConfig()
    """Producing over HTTP."""
    reactive_consumers: dict[str, ReactiveConsumerConfig] = Field(default_factory=dict)
    """Reactive consumers by name."""
    active_consumers: ActiveConsumersConfig = ActiveConsumersConfig()
    """Active consumers: clients create them and read from them over HTTP."""
    cluster: ClusterConfig = ClusterConfig()
    """Other processes of this deployment that share its active consumers."""
    placement: PlacementConfig | None = None
    """Which processes run which reactive consumers; without it each process runs all of them."""
    registrations: RegistrationsConfig = RegistrationsConfig()
    """Reactive consumers that are registered over HTTP."""
    functions: list[Path] = Field(default=[])
    """Function files (Nuclio's `function.yaml`), relative to this file."""
    functions_reload: bool = False
    """Whether a change in a function's folder replaces its workers; for development."""
    durability: Literal["report", "strict"] = "report"
    """What to do if the cluster fails a check for durability (`headrace doctor` lists them). `report`: log it, and add
    it to the details of readiness. `strict`: refuse to start."""
    audit: AuditConfig = AuditConfig()
    """The audit."""
    control: ControlConfig = ControlConfig()
    """Runtime control of consumers and jobs."""
    health: HealthConfig = HealthConfig()
    """Health requests."""
    state_dir: Path = Path(".headrace/state")
    """Folder of what must outlast this process, such as checkpoints and tables, relative to this file."""
    processes: Annotated[int, Field(ge=1, le=16), Number] | Literal["auto"] = 1
    """Processes that serve the port together and share the work. `auto`: as many as cores, at most 4."""
    drain_seconds: PositiveSeconds = 30.0
    """How long a process waits for work in flight after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """Form of log lines. `auto`: text on a terminal, else JSON."""

    def section(self, model: type[C]) -> C:
        """Return the file as one that has the keys of a feature, by the model of these.

        Raises:
            LookupError: No installed feature declares the model.
        """
        if not isinstance(self, model):
            raise LookupError(f"{model.__name__} is not the model of a section: name it in the feature's declaration")
        return self

    @classmethod
    def keys_of(cls, kind: Literal["one_process", "first_process"]) -> list[str]:
        """Return the keys that the models of all features name so."""
        return [name for model in cls.__mro__ for name in sorted(vars(model).get(kind, ()))]

    @field_validator("http")
    @classmethod
    def _check_listener(cls, http: HttpConfig, info: ValidationInfo) -> HttpConfig:
        mode = info.data["security"].mode if "security" in info.data else "none"
        for at, listener in (("", http), ("management.", http.management)):
            if not listener:
                continue
            is_open = mode == "none" or not listener.tls.certificate
            if listener.host not in ("127.0.0.1", "localhost", "::1") and is_open:
                raise ValueError(
                    f"{at}host is {listener.host}, but TLS and authentication are not both on: set http.{at}tls and "
                    "security.mode, or listen on 127.0.0.1 behind a proxy that authenticates other machines"
                )
            if mode == "mtls" and not listener.tls.client_ca:
                raise ValueError(
                    f"security.mode is mtls, but no authority for client certificates is set: set {at}tls.client_ca"
                )
        return http

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        alone = {name: getattr(self, name) for name in self.keys_of("one_process")} | {
            "cluster.peers": self.cluster.peers
        }
        if self.processes != 1 and (found := [name for name, value in alone.items() if value]):
            raise ValueError(
                f"processes is {self.processes}, and {found[0]} needs one process: write processes: 1, or move "
                f"{found[0]} to a file of its own"
            )
        return self

    @model_validator(mode="after")
    def _check_client_properties(self) -> Self:
        for name, consumer in self.reactive_consumers.items():
            try:
                consumer.consumer.client_properties(self.kafka.properties)
            except ValueError as cause:
                raise ValueError(f"reactive_consumers.{name}.consumer, with kafka.properties: {cause}") from None
        return self

    @model_validator(mode="after")
    def _one_consumer_per_group_and_topic(self) -> Self:
        owner: dict[tuple[str, str], str] = {}
        for name, consumer in self.reactive_consumers.items():
            for topic in (*consumer.topics, *consumer.retry.topic_names(consumer.group)):
                other = owner.setdefault((consumer.group, topic), name)
                if other != name:
                    raise ValueError(
                        f"reactive_consumers.{name} and {other} read topic {topic} in the same group "
                        f"{consumer.group}, so each backend would get only a part: use two groups"
                    )
        return self

    @model_validator(mode="after")
    def _no_dead_letter_cycle(self) -> Self:
        dlqs_of: dict[str, set[str]] = {}
        for consumer in self.reactive_consumers.values():
            for topic in consumer.topics if consumer.dead_letter.enabled else ():
                dlqs_of.setdefault(topic, set()).add(consumer.dead_letter.topic_for(topic))
        try:
            TopologicalSorter(dlqs_of).prepare()
        except CycleError as cause:
            topic, *cycle = cause.args[1]
            raise ValueError(
                f"a dead letter of topic {topic} that fails again would return to {topic}, in an endless cycle "
                f"through {', '.join(sorted(cycle))}: change dead_letter.topic of one of these consumers, or turn it "
                "off"
            ) from None
        return self
