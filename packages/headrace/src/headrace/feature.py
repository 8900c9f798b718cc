"""What a feature is: the settings, endpoints, commands and services of one folder, declared once in its `feature.py`.

Entry points of the group `headrace.features` make features known: those of this distribution and of any other.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from headrace.errors import EnvironmentProblem
from headrace.extras import loaded, subject_of

GROUP: Final = "headrace.features"
"""The group of entry points."""
EVERY_OTHER: Final = "*"
"""In `Feature.needs`: every feature that does not need this one."""


@dataclasses.dataclass(frozen=True)
class CliCommand:
    """A command of the command line."""

    where: str
    """`module:object`, a command of click. It is imported when the command is used."""
    help: str
    """Its line in `headrace --help`: the first sentence of the command's own help."""
    extra: str = ""
    """The extra that has all that it needs, where a missing module alone may name another one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature. Classes and functions are named as `module:object`, so a declaration imports nothing."""

    name: str
    section: str = ""
    """The subclass of `HeadraceConfig` whose fields are its keys in `headrace.yaml`."""
    parts: str = ""
    """The subclass of `Parts` that makes its parts of a process; none for commands alone."""
    endpoints: Sequence[str] = ()
    """Classes whose endpoints it serves."""
    commands: Mapping[str, CliCommand] = dataclasses.field(default_factory=dict)
    """Commands by name."""
    tags: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Groups of the API document: the beginnings of the paths in each. The longest beginning counts.

    Features may have paths in the same group."""
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path parameters of its endpoints, and what they mean."""
    topics: str = ""
    """The function that returns the topics that a configuration needs for it (`headrace doctor`)."""
    dead_letters: str = ""
    """The `ForeignDeadLetters` with the readers of what other products write to dead letter topics."""
    checks: str = ""
    """The subclass of `FeatureChecks`: what commands that make no process check."""
    needs: Sequence[str] = ()
    """Features whose parts it gets. They start before it, and drain after it."""
    before: Sequence[str] = ()
    """Features that start after it although they do not name it; those that are not installed do not count."""


@functools.cache
def features() -> Sequence[Feature]:
    """Return every installed feature in the order of start.

    Raises:
        EnvironmentProblem: A declaration cannot be imported, is wrong, or takes a name that is taken.
    """
    found: dict[str, Feature] = {}
    owners: dict[str, EntryPoint] = {}
    subject = functools.partial(subject_of, what="feature")
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        one = loaded(point, "feature")
        if not isinstance(one, Feature) or one.name != point.name:
            text = f"{subject(point)} is not a Feature of this name: update the package, or uninstall it"
            raise EnvironmentProblem(text)
        for name in (f"feature {one.name}", *(f"command {name}" for name in one.commands)):
            if other := owners.get(name):
                raise EnvironmentProblem(f"{subject(other)} and {subject(point)} both add the {name}: uninstall one")
            owners[name] = point
        found[one.name] = one
    return in_order(found.values())


def in_order(features: Iterable[Feature]) -> Sequence[Feature]:
    """Return features so that each follows those that it needs; otherwise by name.

    Raises:
        EnvironmentProblem: A needed feature does not exist, or features need each other.
    """
    by_name = {one.name: one for one in sorted(features, key=lambda one: one.name)}
    earlier = {name: {need for need in one.needs if need != EVERY_OTHER} for name, one in by_name.items()}
    for name, one in by_name.items():
        for later in one.before:
            if later in earlier:
                earlier[later].add(name)
    for name, needs in earlier.items():
        if unknown := needs - by_name.keys():
            needed = ", ".join(sorted(unknown))
            raise EnvironmentProblem(f"feature {name} needs {needed}, which no installed package declares: install it")
    last = [name for name, one in by_name.items() if EVERY_OTHER in one.needs]
    if len(last) > 1:
        raise EnvironmentProblem(f"the features {', '.join(last)} need every other one: only one may, so uninstall one")
    for name in last:
        earlier[name] |= {other for other in by_name if other != name and name not in _all_needs(other, earlier)}
    sorter = TopologicalSorter({name: sorted(needs) for name, needs in earlier.items()})
    try:
        return [by_name[name] for name in sorter.static_order()]
    except CycleError as cause:
        circle = ", ".join(cause.args[1])
        raise EnvironmentProblem(f"features need each other in a circle ({circle}): uninstall one") from cause


def imported(where: str) -> Any:
    """Return the object of a `module:object`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _all_needs(name: str, earlier: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for need in earlier[waiting.pop()] - found:
            found.add(need)
            waiting.append(need)
    return found
