"""The inputs of a driver: topics that exist, Java and jars, TLS files and secrets that can be read."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.errors import HeadraceError, TopicNotFound
from headrace.kafka import Admin, InternalTopic
from headrace.runtime import run_blocking
from headrace_jvm import ensure_artifacts
from headrace_pipelines import driver_protocol
from headrace_pipelines.connector import ConnectorSecurity, connector_options, for_server, refusal, with_registry
from headrace_pipelines.driver_process import Toolchain, find_toolchain
from headrace_pipelines.graph import require_cores, topics_written
from headrace_pipelines.secrets_file import KAFKA, with_secrets
from headrace_pipelines.sinks.batch_transactions import BATCHES_TOPIC
from headrace_pipelines.spark_project import SparkProject
from headrace_pipelines.spec import PipelineKafka, PipelineSpec


class DriverInputs(NamedTuple):
    """The inputs of one driver."""

    plan: driver_protocol.DriverPlan
    toolchain: Toolchain
    security: ConnectorSecurity
    in_use: KafkaSecurity
    """TLS files and login from which `security` was made."""
    partitions: Mapping[str, int]
    """Topic to its partitions at this start."""


class InputSource:
    """Reads the inputs of the drivers of one pipeline, and detects when those of a running driver are out of date."""

    def __init__(
        self, spec: PipelineSpec, kafka: KafkaConfig, registry: SchemaRegistryConfig, folder: Path, admin: Admin
    ) -> None:
        self.folder = folder
        """The pipeline's folder, for checkpoints, secrets and logs."""
        self._spec = spec
        self._kafka = kafka
        self._registry = registry
        self._admin = admin

    async def read(self) -> DriverInputs:
        """Return what a driver needs, and create the topics that it writes to.

        Raises:
            HeadraceError: A topic, Java, a jar, a file or a right is missing; it may be there later.
        """
        spec, kafka, admin = self._spec, self._kafka, self._admin
        partitions = {
            topic: len((await admin.describe_topic(topic, "Read")).partitions)
            for topic in {topic for source in spec.sources.values() for topic in source.topics}
        }
        topic_ids = await admin.topic_ids(partitions, "Read")
        require_cores(spec, partitions)
        for topic, like in topics_written(spec).items():
            await _ensure_topic(admin, topic, like, create=kafka.create_topics)
        if spec.transactions:
            await InternalTopic(BATCHES_TOPIC).ensure(admin)
        toolchain = Toolchain((), None) if spec.driver.remote else await find_toolchain()
        in_use = kafka.security.in_use
        security = await _read_security(in_use)
        own = kafka.model_copy(update={"security": in_use}) if spec.transactions else None
        if own and "task" in spec.transactions:
            security.secrets[KAFKA] = with_secrets(own)
        if spec.uses_registry:
            security = with_registry(security, self._registry)
        if spec.driver.remote:
            security = for_server(security, self.folder)
        plan = driver_protocol.DriverPlan(
            spec=spec.model_copy(update={"kafka": PipelineKafka()}),
            bootstrap_servers=kafka.bootstrap_servers,
            security=security.options,
            kafka=own,
            folder=self.folder,
            jars=await jars_of(spec, toolchain),
            java_flags=toolchain.flags,
            topic_ids=topic_ids,
        )
        return DriverInputs(plan, toolchain, security, in_use, partitions)

    async def is_topic_recreated(self, inputs: DriverInputs) -> bool:
        """Return whether a topic was created again since the inputs were read; False if Kafka does not tell."""
        try:
            found = await self._admin.topic_ids(inputs.plan.topic_ids, "Read")
        except HeadraceError:  # the driver reports it as well
            return False
        return {**inputs.plan.topic_ids, **found} != inputs.plan.topic_ids

    def security_now(self) -> KafkaSecurity:
        """Return the TLS files and the login that clients use now."""
        return self._kafka.security.in_use

    async def check_security(self) -> None:
        """Check that a driver could be started with them.

        Raises:
            HeadraceError: A file cannot be read, or is not usable.
        """
        await _read_security(self.security_now())

    def explained(self, event: driver_protocol.AnyEvent) -> driver_protocol.AnyEvent:
        """Return an event of the driver; if Kafka rejected the driver, its text has the cause and the remedy."""
        if isinstance(event, driver_protocol.Failed) and event.error == driver_protocol.KAFKA_REFUSES:
            return msgspec.structs.replace(event, text=refusal(event.text, self._kafka, self._spec))
        return event


async def jars_of(spec: PipelineSpec, toolchain: Toolchain) -> tuple[Path, ...]:
    """Return the jars of a driver; those of Delta are fetched for the first project that needs them.

    Raises:
        EnvironmentProblem: A jar cannot be downloaded.
    """
    if not (isinstance(spec, SparkProject) and spec.uses_delta):
        return toolchain.jars
    folder = await run_blocking(ensure_artifacts, "delta")
    return (*toolchain.jars, *sorted(folder.glob("*.jar")))


async def _read_security(security: KafkaSecurity) -> ConnectorSecurity:
    return await run_blocking(functools.partial(connector_options, security))


async def _ensure_topic(admin: Admin, topic: str, like: str, *, create: bool) -> None:
    """Create a topic that flows write to; one that exists needs no right to create it."""
    try:
        await admin.describe_topic(topic, "Write")
    except TopicNotFound:
        if not create:
            raise
        await admin.ensure_topic_like(topic, like)
