"""Makes the pipelines of a configuration."""

import functools
import logging

from headrace.config.kafka_security import warnings_of
from headrace.consumers.consumer_set import INTERNAL, ConsumerSet
from headrace.consumers.lag import GroupTopics
from headrace.errors import PipelineInvalid
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace_pipelines.driver_process import check_heaps
from headrace_pipelines.load import load_pipelines
from headrace_pipelines.pipeline_sections import PipelineSections
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spark_project import load_projects
from headrace_pipelines.spec import PipelineSpec

log = logging.getLogger(__name__)


class RunningPipelines:
    """The pipelines of a configuration."""

    def __init__(self, context: ProcessContext, consumers: ConsumerSet, internal: InternalTopics) -> None:
        """Make the pipelines; nothing is started or contacted.

        Raises:
            PipelineInvalid: A pipeline file is not usable.
        """
        self._context = context
        self._config = config = context.config
        self._consumers = consumers
        self._internal = internal
        self.runs: dict[str, PipelineRun] = {}
        """The runs by name."""
        sections = config.section(PipelineSections)
        specs = load_pipelines(sections.pipelines)
        for spec in check_heaps([*specs, *load_projects(sections.spark_pipelines, specs)]):
            self.runs[spec.name] = self._run(spec)

    def _run(self, spec: PipelineSpec) -> PipelineRun:
        for topic in (topic for flow in spec.flows.values() for topic in flow.sink.topics):
            if self._internal.kind_of(topic):
                raise PipelineInvalid(f"pipeline {spec.name}: sink.topic {topic} {INTERNAL}")
        context, config = self._context, self._config
        for warning in warnings_of(spec.kafka.security) if spec.kafka.security else ():
            log.warning("pipeline %s: %s", spec.name, warning)
        admin = self._consumers.topics_of(spec.cluster(config.kafka), f"pipeline {spec.name}").admin
        folder, registry = config.state_dir / "pipelines", config.schema_registry
        run = PipelineRun(spec, admin.config, folder, context.clock, admin, registry)

        def add_flow(flow: str, group: str) -> None:
            self._consumers.other_groups[group] = GroupTopics(admin, [])
            counts = functools.partial(run.counts, flow)
            context.metrics.watch_deliveries("pipeline", f"{spec.name}.{flow}", counts)

        run.watch_flows(add_flow)
        return run
