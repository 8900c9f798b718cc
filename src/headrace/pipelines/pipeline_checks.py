"""What commands check of pipelines without a process."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.model import HeadraceConfig
from headrace.consumers.feature_checks import FeatureChecks
from headrace.consumers.preconditions import Finding
from headrace.errors import HeadraceError

_JAVA = 17


def _schema() -> dict[str, Any]:
    from headrace.config.explain import document_schema
    from headrace.pipelines.spec import PipelineSpec

    return document_schema("pipeline.yaml", PipelineSpec.model_json_schema())


class PipelineChecks(FeatureChecks):
    """Pipeline files, and the Java and memory that they need."""

    schemas: Mapping[str, Callable[[], dict[str, Any]]] = {"pipeline": _schema}

    def loaders(self, config: HeadraceConfig | None) -> Mapping[str, Callable[[Path], object]]:
        from headrace.pipelines.load import load_pipeline

        return {"pipelines": functools.partial(load_pipeline, check=True)}

    def memory_bytes(self, config: HeadraceConfig) -> int:
        if not config.pipelines:
            return 0
        from headrace.pipelines.load import load_pipelines

        return sum(one.driver.heap_bytes for one in load_pipelines(config.pipelines) if not one.driver.remote)

    async def machine(self, config: HeadraceConfig) -> Sequence[Finding]:
        if not config.pipelines:
            return ()
        from headrace.runtime.jvm import find_java

        try:
            java = find_java(_JAVA, for_spark=True)
        except HeadraceError as error:
            return [Finding("machine", "Java", "failing", "no suitable version", error.description)]
        return [Finding("machine", "Java", "ok", str(java.home))]
