"""From a pipeline file to its spec, with every problem named by its line."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.config.explain import explain, location_of
from headrace.config.kafka_security import file_problems
from headrace.config.references import ReferenceProblem, files_in, holds_plain_text, is_secret_name, resolve, too_open
from headrace.config.yaml_tree import KeyPath, Problems, dotted, read_text, read_tree
from headrace.errors import PipelineInvalid
from headrace.pipelines.connector import NOT_VERIFIED
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

    def report(where: KeyPath, sentence: str) -> None:
        problems.add(location_of(where, locations), where, sentence)

    references = _References(path, report)
    if isinstance(tree, dict) and "kafka" in tree:
        tree["kafka"] = references.replaced(tree["kafka"], ("kafka",))
    try:
        spec = PipelineSpec.model_validate(tree)
    except ValidationError as cause:
        errors = cause.errors(include_url=False, include_input=False)
        hidden = references.texts
        explain(errors, tree, locations, references.unresolved, problems, PipelineSpec, hidden=hidden)
        raise PipelineInvalid("\n".join(problems.ordered)) from None
    spec = _with_security_files(spec, path.resolve().parent, references.texts)
    for where, sentence in [*problems_of(spec), *_security_problems(spec)]:
        report(where, sentence)
    for found in check_sql(spec) if check else ():
        if found.is_problem:
            problems.add(location_of(found.path, locations), found.path, found.sentence)
        else:
            parts = (location_of(found.path, locations), dotted(found.path), found.sentence)
            log.warning(": ".join(part for part in parts if part))
    if problems.found:
        raise PipelineInvalid("\n".join(problems.ordered))
    return spec


_SECURITY = ("kafka", "security")


class _References:
    """Replaces the references in a section of a file, and reports those without a value and secrets in the open."""

    def __init__(self, file: Path, report: Callable[[KeyPath, str], None]) -> None:
        self._file = file
        self._report = report
        self.texts: dict[KeyPath, str] = {}
        """Paths of replaced references, with their text."""
        self.unresolved: set[KeyPath] = set()
        """Paths of references without a value."""

    def replaced(self, value: Any, at: KeyPath) -> Any:
        """Return a value of the file with its references replaced."""
        if isinstance(value, dict):
            return {key: self.replaced(item, (*at, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.replaced(item, (*at, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        files: list[Path] = []
        try:
            found = resolve(value, os.environ, self._file.resolve().parent, files.append)
        except ReferenceProblem as cause:
            self.unresolved.add(at)
            self._report(at, str(cause))
            return value
        if is_secret_name(str(at[-1])) or "PRIVATE KEY-----" in found:
            in_the_open = [(self._file, False)] if holds_plain_text(value) else []
            for file, mounted in [*in_the_open, *((file, True) for file in files)]:
                if reason := too_open(file, mounted=mounted):
                    self._report(at, reason)
        if found != value:
            self.texts[at] = value
        return found


def _with_security_files(spec: PipelineSpec, folder: Path, texts: Mapping[KeyPath, str]) -> PipelineSpec:
    if spec.kafka.security is None:
        return spec
    below = len(_SECURITY)
    references = {path[below:]: text for path, text in texts.items() if path[:below] == _SECURITY and files_in(text)}
    security = spec.kafka.security.read_from(folder, references)
    return spec.model_copy(update={"kafka": spec.kafka.model_copy(update={"security": security})})


def _security_problems(spec: PipelineSpec) -> Iterator[tuple[KeyPath, str]]:
    security = spec.kafka.security
    if security is None:
        return
    for problem in file_problems(security):
        yield (*_SECURITY, *problem.path), problem.sentence
    if (key := security.key_file) and key.is_file() and (reason := too_open(key, mounted=True)):
        yield (*_SECURITY, "tls", "key"), reason
    if security.tls and not security.tls.verify_certificate:
        yield (*_SECURITY, "tls", "verify_certificate"), NOT_VERIFIED
