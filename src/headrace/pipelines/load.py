"""From a pipeline file to its spec, with every problem named by its line."""

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from headrace.config.explain import explain, location_of
from headrace.config.yaml_tree import Problems, dotted, read_text, read_tree
from headrace.errors import PipelineInvalid
from headrace.pipelines.graph import problems_of
from headrace.pipelines.spec import PipelineSpec
from headrace.pipelines.sql import check_sql

log = logging.getLogger(__name__)


def load_pipelines(paths: Sequence[Path]) -> list[PipelineSpec]:
    """Return the pipelines of several files.

    Raises:
        PipelineInvalid: See `load_pipeline`; or two files have the same pipeline name.
    """
    found: dict[str, tuple[Path, PipelineSpec]] = {}
    for path in paths:
        spec = load_pipeline(path)
        if spec.name in found:
            raise PipelineInvalid(
                f"{path}: name: {spec.name} is the name of {found[spec.name][0]} too, so they would share "
                "checkpoints: give each pipeline a name of its own"
            )
        found[spec.name] = path, spec
    return [spec for _, spec in found.values()]


def load_pipeline(path: Path, *, check: bool = False) -> PipelineSpec:
    """Return the pipeline that a file describes.

    Args:
        path: The file.
        check: Also check its SQL, and log what may be wrong with it.

    Raises:
        PipelineInvalid: One line per problem with file and line, all problems at once.
    """
    problems = Problems()
    tree, locations = read_tree(read_text(path, PipelineInvalid, "Correct the path"), str(path), problems)
    try:
        spec = PipelineSpec.model_validate(tree)
    except ValidationError as cause:
        explain(cause.errors(include_url=False, include_input=False), tree, locations, set(), problems, PipelineSpec)
        raise PipelineInvalid("\n".join(problems.ordered)) from None
    for where, sentence in problems_of(spec):
        problems.add(location_of(where, locations), where, sentence)
    for found in check_sql(spec) if check else ():
        if found.is_problem:
            problems.add(location_of(found.path, locations), found.path, found.sentence)
        else:
            parts = (location_of(found.path, locations), dotted(found.path), found.sentence)
            log.warning(": ".join(part for part in parts if part))
    if problems.found:
        raise PipelineInvalid("\n".join(problems.ordered))
    return spec
