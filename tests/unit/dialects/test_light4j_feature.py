"""The feature `light4j`: its paths exist only with it, and it moves no service."""

from __future__ import annotations

import importlib.util

import pytest
from pydantic import ValidationError

from headrace import feature
from headrace.config import whole_file
from headrace.config.administration import HealthConfig
from headrace.config.model import HeadraceConfig
from headrace.config.whole_file import WholeFile
from headrace.errors import EnvironmentProblem
from headrace.feature import Feature, features, imported
from headrace.http.endpoint import endpoints_of
from headrace_dialects.light4j.light_sections import LightSections

PATHS = {
    "/adm/chaosmonkey",
    "/adm/chaosmonkey/{assault}",
    "/adm/messagereplaymetadata",
    "/consumers/active/audit",
    "/consumers/deadLetter/active",
    "/consumers/deadLetter/reactive",
}


def paths_of(feature: Feature) -> set[str]:
    return {one.path for where in feature.endpoints for one in endpoints_of(imported(where))}


def test_the_paths_of_light_4j_are_absent_without_the_package() -> None:
    """The core and the other guests serve none of them, so it is all or nothing."""
    assert {one.name: paths_of(one) & PATHS for one in features() if paths_of(one) & PATHS} == {"light4j": PATHS}
    assert next(paths_of(one) for one in features() if one.name == "light4j") == PATHS


def test_it_adds_a_section() -> None:
    """The core alone rejects it, and a process has it whatever else is installed."""
    tree = {"admin": {"chaos": "loopback", "pass_through": ["http://127.0.0.1:1"]}}
    admin = WholeFile.model_validate(tree).section(LightSections).admin
    assert (admin.chaos, admin.pass_through) == ("loopback", ["http://127.0.0.1:1"])
    with pytest.raises(ValidationError, match="admin"):
        HeadraceConfig.model_validate(tree)


class OtherHealth(HealthConfig):
    other: int = 1


class OtherAdmin(HeadraceConfig):
    admin: OtherHealth = OtherHealth()


class WiderHealth(HeadraceConfig):
    health: OtherHealth = OtherHealth()  # type: ignore[assignment]


@pytest.mark.parametrize(("other", "section"), [(OtherAdmin, "admin"), (WiderHealth, "health")])
def test_a_feature_cannot_take_the_section_of_another_or_of_the_core(
    monkeypatch: pytest.MonkeyPatch, other: type[HeadraceConfig], section: str
) -> None:
    """One of them would lose its keys without a word."""
    models = {"light4j": LightSections, "other": other}
    monkeypatch.setattr(feature, "features", lambda: [Feature(name=name, section=name) for name in models])
    monkeypatch.setattr(feature, "imported", models.__getitem__)
    spec = importlib.util.spec_from_file_location("whole_file_of_two", whole_file.__file__)
    assert spec and spec.loader
    with pytest.raises(EnvironmentProblem, match=f"feature other adds the section {section}, whose name is taken"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
