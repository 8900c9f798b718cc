"""The keys that pipelines add to `headrace.yaml`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from headrace.config.model import HeadraceConfig


class PipelineSections(HeadraceConfig):
    """The file with the key of pipelines."""

    one_process: ClassVar = frozenset(("pipelines", "spark_pipelines"))

    pipelines: list[Path] = Field(default=[])
    """Pipeline files, relative to this file."""
    spark_pipelines: list[Path] = Field(default=[])
    """Files `spark-pipeline.yml` of projects of Spark Declarative Pipelines, relative to this file."""
