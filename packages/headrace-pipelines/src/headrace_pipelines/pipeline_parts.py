"""The pipelines of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace_pipelines.pipeline_sections import PipelineSections
from headrace_pipelines.routes import PipelineEndpoints

if TYPE_CHECKING:  # what a configuration does not name is not imported
    from headrace_pipelines.running_pipelines import RunningPipelines


class PipelineParts(Parts):
    """The runs of pipelines and their endpoints."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._running: RunningPipelines | None = None
        sections = context.config.section(PipelineSections)
        if sections.pipelines or sections.spark_pipelines:
            from headrace_pipelines.running_pipelines import RunningPipelines

            parts = needed.of(ConsumersParts)
            self._running = RunningPipelines(context, parts.consumers, parts.internal)
        self.endpoints = [PipelineEndpoints(self._running.runs if self._running else {})]

    def services(self) -> Sequence[Service]:
        return [*self._running.runs.values()] if self._running else ()
