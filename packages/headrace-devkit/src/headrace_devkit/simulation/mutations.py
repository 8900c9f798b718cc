"""Planted bugs: `mutations.yaml` has changes of a few lines of Headrace, and a scenario must find each of them.

`plant` changes the code of live functions, so a process that has imported everything may plant one after its fork.
"""

import functools
import gc
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import yaml

import headrace

_FOLDER: Final = Path(headrace.__file__).parent


class Mutation(NamedTuple):
    """One bug."""

    file: str
    old: str
    new: str


MUTATIONS: Final[Mapping[str, Mutation]] = {
    name: Mutation(**row) for name, row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


@functools.cache  # it stays
def plant(name: str) -> None:
    """Change the code of this process as a mutation says.

    Raises:
        LookupError: What it replaces is not there once, or no function has changed.
    """
    changed = changed_code(name)
    path = str(_FOLDER / MUTATIONS[name].file)
    planted = 0
    gc.unfreeze()  # what is frozen is not listed
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == path:
            code = changed.get(function.__code__.co_qualname)
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
                planted += 1
    if not planted:
        raise LookupError(f"{name}: no function of {path} has changed")


def changed_code(name: str) -> dict[str, types.CodeType]:
    """Return the code that a mutation changes, by the name of the function; raises as `plant` does."""
    mutation = MUTATIONS[name]
    path = _FOLDER / mutation.file
    source = path.read_text()
    if (count := source.count(mutation.old)) != 1:
        raise LookupError(f"{name}: {mutation.file} has {mutation.old!r} {count} times, not once: correct the row")
    before = _codes(compile(source, str(path), "exec"))
    after = _codes(compile(source.replace(mutation.old, mutation.new), str(path), "exec"))
    return {name: code for name, code in after.items() if code != before.get(name)}


def _codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """Return the code of each function by its qualified name."""
    found = {code.co_qualname: code}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _codes(constant)
    return found
