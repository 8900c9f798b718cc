"""Features: their order, and what is derived from their declarations."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import click
import pytest
from pydantic import model_validator

from headrace import extras, feature
from headrace.app.app import App
from headrace.app.documents import every_endpoint
from headrace.cli.file_schemas import schema_of
from headrace.config import whole_file
from headrace.config.model import HeadraceConfig
from headrace.config.whole_file import WholeFile
from headrace.errors import EnvironmentProblem
from headrace.extras import hook
from headrace.feature import EVERY_OTHER, CliCommand, Feature, features, imported, in_order
from headrace.http.endpoint import endpoints_of
from headrace_devkit.testing import ManualClock

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
    with pytest.raises(EnvironmentProblem, match="feature a needs b, which no installed package declares"):
        order(Feature(name="a", needs=["b"]))
    with pytest.raises(EnvironmentProblem, match=r"in a circle \(a, b, a\)|in a circle \(b, a, b\)"):
        order(Feature(name="a", needs=["b"]), Feature(name="b", needs=["a"]))
    with pytest.raises(EnvironmentProblem, match="the features a, b need every other one: only one may"):
        order(Feature(name="a", needs=[EVERY_OTHER]), Feature(name="b", needs=[EVERY_OTHER]))


class Others(HeadraceConfig):
    """The section of a guest, with a check that is named as one of the core."""

    others: int = 0

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        return self


def test_a_check_replaces_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two methods with one name only one would run, and settings that the other refuses would pass."""
    monkeypatch.setattr(whole_file, "features", lambda: [Feature(name="o", section=f"{__name__}:Others")])
    monkeypatch.setattr(whole_file, "imported", lambda _: Others)
    with pytest.raises(EnvironmentProblem, match="feature o has a check _check_processes, as another has"):
        whole_file._whole_file()


def point(name: str, package: str, load: Callable[[], object]) -> Any:
    return SimpleNamespace(name=name, value=f"{package}:FEATURE", dist=SimpleNamespace(name=package), load=load)


def gone() -> object:
    raise ImportError("no module named gone")


GREET = {"greet": CliCommand("m:greet", "Greet.")}


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([point("a", "p", gone)], "the feature a of the package p cannot be loaded: no module named gone"),
        ([point("a", "p", lambda: 1)], "the feature a of the package p is not a Feature of this name"),
        ([point("a", "p", lambda: Feature(name="b"))], "the feature a of the package p is not a Feature of this name"),
        (
            [point("a", name, lambda: Feature(name="a")) for name in "pq"],
            "of the package p and the feature a of the package q both add the feature a",
        ),
        (
            [point(name, name, lambda name=name: Feature(name=name, commands=GREET)) for name in "ab"],
            "the feature a of the package a and the feature b of the package b both add the command greet",
        ),
    ],
)
def test_a_wrong_declaration_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, points: list[Any], problem: str
) -> None:
    """Any package may add one; the error says which to change. One that replaced another would take its work away."""
    monkeypatch.setattr(feature, "entry_points", lambda group: points)
    with pytest.raises(EnvironmentProblem, match=re.escape(problem)):
        features.__wrapped__()


def test_a_slow_backend_does_not_use_up_the_drain_of_the_others() -> None:
    """A process drains in reverse: first the requests, last what waits for backends and handlers."""
    names = [one.name for one in features()]
    chain = "consumers commands reactive functions pipelines runs registrations active produce listeners console"
    assert sorted(chain.split(), key=names.index) == chain.split()
    assert names.index("queries") < names.index("reactive")
    assert names.index("active") < names.index("process")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_names_each_command_by_its_own_sentence(name: str) -> None:
    """The declaration has it, so that help imports no command; both are the same."""
    command: click.Command = imported(COMMANDS[name].where)
    assert command.name == name
    assert COMMANDS[name].help == command.get_short_help_str(500)


async def test_every_family_of_endpoints_that_a_process_serves_is_declared() -> None:
    """Otherwise it would be missing in the API document and in the tests of access."""
    app = App(WholeFile(), ManualClock())
    served = [type(family) for parts in app.process.parts.values() for family in parts.endpoints]
    assert {one.id for family in served for one in endpoints_of(family)} <= {one.id for one in every_endpoint()}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: hook("record_filter", "consume"), "consume needs the package headrace-queries: pip install"),
        (lambda: schema_of("pipeline"), "headrace config schema pipeline needs the package headrace-pipelines"),
    ],
)
def test_what_a_missing_package_adds_names_it(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], problem: str
) -> None:
    """A hook and the schema of a file are refused with the package to install."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr(extras, "entry_points", lambda **_: [])
    with pytest.raises(EnvironmentProblem, match=problem):
        call()
