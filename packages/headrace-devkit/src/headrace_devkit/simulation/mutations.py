"""Planted bugs: `mutations.yaml` has changes of a few lines of Headrace, and a scenario must find each of them.

`plant` changes the code of live functions, so a process that has imported everything may plant one after its fork.
"""

import functools
import gc
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

import headrace

_FOLDER: Final = Path(headrace.__file__).parent
_FOUND: Final = Path(__file__).with_name("found_bugs.yaml")
_FOUND_HEAD: Final = "# What found each planted bug: written by `--plant all --keep`.\n"


class Mutation(NamedTuple):
    """One bug."""

    file: str
    old: str
    new: str
    scenario: str = "push"
    """What finds it."""
    also: Mapping[str, Any] | None = None
    """Another change of this form, where two guards must be gone before anything happens."""

    @property
    def changes(self) -> list["Mutation"]:
        """All changes of the bug."""
        return [self, Mutation(**self.also)] if self.also else [self]


class Found(NamedTuple):
    """What found a bug."""

    seed: int
    problem: str
    core_seconds: float
    """Of all seeds up to this one."""


MUTATIONS: Final[Mapping[str, Mutation]] = {
    name: Mutation(**row) for name, row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def found_bugs() -> dict[str, Found]:
    """Return what found each bug, when it was last looked for; one that was not found is missing."""
    return {name: Found(**row) for name, row in (yaml.safe_load(_FOUND.read_text()) or {}).items()}


def keep_found(found: Mapping[str, Found]) -> None:
    """Write what found each bug, for the page of the reference."""
    rows = {name: found[name]._asdict() for name in MUTATIONS if name in found}
    _FOUND.write_text(_FOUND_HEAD + (yaml.safe_dump(rows, sort_keys=False) if rows else ""))


@functools.cache  # it stays
def plant(name: str) -> None:
    """Change the code of this process as a mutation says.

    Raises:
        LookupError: What it replaces is not there once, or no function has changed.
    """
    gc.unfreeze()  # what is frozen is not listed
    for change in MUTATIONS[name].changes:
        if not replace_code(change.file, changed_code(change)):
            raise LookupError(f"{name}: no function of {change.file} has changed")


def changed_code(change: Mutation) -> dict[str, types.CodeType]:
    """Return the code that a change of a bug changes, by the name of the function; raises as `plant` does."""
    return code_with(change.file, {change.old: change.new})


def code_with(file: str, replacements: Mapping[str, str]) -> dict[str, types.CodeType]:
    """Return the code of the functions of a file of the core that differ when texts of it are replaced.

    Raises:
        LookupError: A text is not there once.
    """
    path = _FOLDER / file
    source = changed = path.read_text()
    for old, new in replacements.items():
        if (count := source.count(old)) != 1:
            raise LookupError(f"{file} has {old!r} {count} times, not once: correct the row")
        changed = changed.replace(old, new)
    before = _codes(compile(source, str(path), "exec"))
    after = _codes(compile(changed, str(path), "exec"))
    return {name: code for name, code in after.items() if code != before.get(name)}


def replace_code(file: str, codes: Mapping[str, types.CodeType]) -> list[types.FunctionType]:
    """Give the live functions of a file of the core other code, by their names; return these functions."""
    path = str(_FOLDER / file)
    replaced = []
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == path:
            code = codes.get(function.__code__.co_qualname)
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
                replaced.append(function)
    return replaced


def _codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """Return the code of each function by its qualified name."""
    found = {code.co_qualname: code}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _codes(constant)
    return found
