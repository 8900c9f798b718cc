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


def _load_project(path: Path) -> object:
    from headrace_pipelines.spark_project import load_project

    return load_project(path)


def _files(config: HeadraceConfig) -> list[Path]:
    sections = config.section(PipelineSections)
    return [*sections.pipelines, *sections.spark_pipelines]


def _load(path: Path) -> object:
    from headrace_pipelines.load import load_pipeline

    return load_pipeline(path, check=True)


class PipelineChecks(FeatureChecks):
    """Pipeline files, and the Java and memory that they need."""

    schemas: Mapping[str, Callable[[], dict[str, Any]]] = {"pipeline": _schema}

    def loaders(self, config: HeadraceConfig | None) -> Mapping[str, Callable[[Path], object]]:
        return {"pipelines": _load, "spark_pipelines": _load_project}

    def loads_libraries(self, config: HeadraceConfig) -> bool:
        return bool(_files(config))

    def watched_files(self, config: HeadraceConfig) -> Iterable[Path]:
        for file in _files(config):
            yield from (path for path in file.parent.iterdir() if path.suffix in _WATCHED)

    def memory_bytes(self, config: HeadraceConfig) -> int:
        if not _files(config):
            return 0
        from headrace_pipelines.load import load_pipelines
        from headrace_pipelines.spark_project import load_projects

        sections = config.section(PipelineSections)
        specs = [*load_pipelines(sections.pipelines), *load_projects(sections.spark_pipelines)]
        return sum(one.driver.heap_bytes for one in specs if not one.driver.remote)

    async def machine(self, config: HeadraceConfig) -> Sequence[Finding]:
        if not _files(config):
            return ()
        from headrace_jvm import find_java

        try:
            java = find_java(_JAVA, for_spark=True)
        except HeadraceError as error:
            return [Finding("machine", "Java", "failing", "no suitable version", error.description)]
        return [Finding("machine", "Java", "ok", str(java.home))]
