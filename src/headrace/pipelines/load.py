"""From a pipeline file to its spec, with every problem named by its line."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from headrace.config.explain import explain, place_of
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import PipelineInvalid
from headrace.pipelines.graph import problems_of
from headrace.pipelines.spec import PipelineSpec


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


def load_pipeline(path: Path) -> PipelineSpec:
    """Return the pipeline that a file describes.

    Raises:
        PipelineInvalid: One line per problem with file and line, all problems at once.
    """
    problems = Problems()
    tree, places = read_tree(read_text(path, PipelineInvalid, "Correct the path"), str(path), problems)
    try:
        spec = PipelineSpec.model_validate(tree)
    except ValidationError as cause:
        explain(cause.errors(include_url=False, include_input=False), tree, places, set(), problems, PipelineSpec)
        raise PipelineInvalid("\n".join(problems.found)) from None
    for where, sentence in problems_of(spec):
        problems.add(place_of(where, places), where, sentence)
    if problems.found:
        raise PipelineInvalid("\n".join(problems.found))
    return spec
