"""What commands check of pipelines without a process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.model import HeadraceConfig
from headrace.consumers.feature_checks import FeatureChecks
from headrace.consumers.preconditions import Finding
from headrace.errors import HeadraceError
from headrace_pipelines.pipeline_sections import PipelineSections

_JAVA = 17
_WATCHED = (".yaml", ".yml", ".sql", ".py")


def _schema() -> dict[str, Any]:
    from headrace.config.explain import document_schema
    from headrace_pipelines.spec import PipelineSpec

    return document_schema("pipeline.yaml", PipelineSpec.model_json_schema())


def _load(path: Path) -> object:
    from headrace_pipelines.load import load_pipeline

    return load_pipeline(path, check=True)


class PipelineChecks(FeatureChecks):
    """Pipeline files, and the Java and memory that they need."""

    schemas: Mapping[str, Callable[[], dict[str, Any]]] = {"pipeline": _schema}

    def loaders(self, config: HeadraceConfig | None) -> Mapping[str, Callable[[Path], object]]:
        return {"pipelines": _load}

    def loads_libraries(self, config: HeadraceConfig) -> bool:
        return bool(config.section(PipelineSections).pipelines)

    def watched_files(self, config: HeadraceConfig) -> Iterable[Path]:
        for file in config.section(PipelineSections).pipelines:
            yield from (path for path in file.parent.iterdir() if path.suffix in _WATCHED)

    def memory_bytes(self, config: HeadraceConfig) -> int:
        files = config.section(PipelineSections).pipelines
        if not files:
            return 0
        from headrace_pipelines.load import load_pipelines

        return sum(one.driver.heap_bytes for one in load_pipelines(files) if not one.driver.remote)

    async def machine(self, config: HeadraceConfig) -> Sequence[Finding]:
        if not config.section(PipelineSections).pipelines:
            return ()
        from headrace_jvm import find_java

        try:
            java = find_java(_JAVA, for_spark=True)
        except HeadraceError as error:
            return [Finding("machine", "Java", "failing", "no suitable version", error.description)]
        return [Finding("machine", "Java", "ok", str(java.home))]
