"""Test cases: files `tests/*.yaml` with given rows of sources, and expected rows of flows and views."""

import contextlib
import csv
import difflib
import json
from pathlib import Path
from typing import Any

from headrace.config.explain import validated
from headrace.config.section import Seconds, Section
from headrace.config.yaml_tree import MAX_BYTES, Problems, read_text, read_tree
from headrace.errors import PipelineInvalid
from headrace_pipelines import driver_protocol


class TestCase(Section):
    """One test case."""

    pipeline: str | None = None
    """Name of the pipeline file it is for, if the folder has several."""
    given: dict[str, list[Any] | str] = {}
    """Source to its rows, to a CSV or JSON file with them, or to a list of these: the steps."""
    expect: dict[str, list[Any] | str]
    """Flow or view to its rows, or to a file. Columns that no row names are not compared."""
    streaming: bool = False
    """Whether each step is a micro-batch of a streaming query; the rows are then all that it writes."""
    step_seconds: Seconds = 1.0
    """With `streaming`: time that passes from one step to the next for a processor, without waiting."""
    ordered: bool = False
    """Whether the order of the rows counts."""

    def task(self, folder: Path) -> driver_protocol.DriverTask:
        """Return the task, with the rows of the files in a folder."""
        given = {name: steps_of(value, folder) for name, value in self.given.items()}
        steps = {name: steps_of(value, folder) for name, value in self.expect.items()}
        expect = {name: [row for step in found for row in step] for name, found in steps.items()}
        return driver_protocol.DriverTask(
            kind="test", given=given, expect={**expect}, streaming=self.streaming, step_seconds=self.step_seconds
        )


def load_test_case(file: Path) -> TestCase:
    """Return the test case of a file.

    Raises:
        PipelineInvalid: The file cannot be read, or has unknown keys or wrong values.
    """
    problems = Problems()
    tree = read_tree(read_text(file, PipelineInvalid, "Correct the path"), str(file), problems)
    spec = validated(TestCase, tree, problems)
    if problems.found or not spec:
        raise PipelineInvalid("\n".join(problems.ordered))
    return spec


def steps_of(value: list[Any] | str, folder: Path) -> list[driver_protocol.Rows]:
    """Return rows, or what names them, as a list of steps."""
    if isinstance(value, str):
        text = read_text(folder / value, PipelineInvalid, "Correct the name")
        if len(text.encode()) > MAX_BYTES:
            raise PipelineInvalid(f"{folder / value}: is larger than {MAX_BYTES} bytes: give fewer rows")
        try:
            if value.endswith(".csv"):
                return [
                    [{name: _cell(cell) for name, cell in row.items()} for row in csv.DictReader(text.splitlines())]
                ]
            return [json.loads(text) if text.lstrip().startswith("[") else [*map(json.loads, text.splitlines())]]
        except ValueError as cause:
            raise PipelineInvalid(f"{folder / value}: does not contain rows as JSON: {cause}. Correct it") from cause
    if all(isinstance(row, dict) for row in value):
        return [value]
    return [step for each in value for step in steps_of(each, folder)]


def _cell(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text or None


def differences(actual: list[str], expected: list[str], *, ordered: bool = False) -> list[str]:
    """Return what differs between two lists of rows: `-` is missing, `+` was not expected; empty if nothing does."""
    if not ordered:
        actual, expected = sorted(actual), sorted(expected)
    return [] if actual == expected else [line.rstrip("\n") for line in difflib.ndiff(expected, actual)]
