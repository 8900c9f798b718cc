"""Features: their order, and what is derived from their declarations."""

from __future__ import annotations

from graphlib import CycleError
from types import SimpleNamespace
from typing import Any

import click
import pytest

from headrace import feature
from headrace.app.app import App
from headrace.app.documents import every_endpoint
from headrace.config.model import HeadraceConfig
from headrace.errors import EnvironmentProblem
from headrace.feature import EVERY_OTHER, Feature, features, imported, in_order
from headrace.http.endpoint import endpoints_of
from headrace.testing import ManualClock

COMMANDS = {name: command for one in features() for name, command in one.commands.items()}


def order(*declared: Feature) -> list[str]:
    return [one.name for one in in_order(declared)]


def test_what_a_feature_needs_stands_before_it() -> None:
    """Whatever the order of the declarations; `before` says the same from the other side."""
    a, b = Feature(name="a", needs=["b"]), Feature(name="b", needs=["d"])
    c, d = Feature(name="c", before=["d", "not installed"]), Feature(name="d")
    assert order(a, b, c, d) == order(d, c, b, a) == ["c", "d", "b", "a"]


def test_a_feature_may_need_every_other_that_does_not_need_it() -> None:
    """So listeners serve the endpoints of all, and what calls a listener comes after it."""
    console, listeners = Feature(name="console", needs=["listeners"]), Feature(name="listeners", needs=[EVERY_OTHER])
    assert order(console, listeners, Feature(name="z")) == ["z", "listeners", "console"]


def test_unknown_and_circular_needs_are_errors() -> None:
    """A feature without what it needs would fail later, and far from the reason."""
    with pytest.raises(LookupError, match="feature a needs b, which no installed package declares"):
        order(Feature(name="a", needs=["b"]))
    with pytest.raises(CycleError):
        order(Feature(name="a", needs=["b"]), Feature(name="b", needs=["a"]))


def test_a_feature_that_cannot_be_imported_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any package may add one; the error says which to change."""

    def load() -> Any:
        raise ImportError("no module named gone")

    broken = SimpleNamespace(name="lost", value="gone:FEATURE", dist=SimpleNamespace(name="headrace-lost"), load=load)
    monkeypatch.setattr(feature, "entry_points", lambda group: [broken])
    with pytest.raises(EnvironmentProblem, match="feature lost of the package headrace-lost cannot be imported"):
        features.__wrapped__()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_names_each_command_by_its_own_sentence(name: str) -> None:
    """The declaration has it, so that help imports no command; both are the same."""
    command: click.Command = imported(COMMANDS[name].where)
    assert command.name == name
    assert COMMANDS[name].help == command.get_short_help_str(500)


async def test_every_family_of_endpoints_that_a_process_serves_is_declared() -> None:
    """Otherwise it would be missing in the API document and in the tests of access."""
    app = App(HeadraceConfig(), ManualClock())
    served = [type(family) for parts in app.process.parts.values() for family in parts.endpoints]
    assert {one.id for family in served for one in endpoints_of(family)} <= {one.id for one in every_endpoint()}
