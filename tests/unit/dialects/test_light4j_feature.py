"""The feature `light4j`: its paths exist only with it, and it moves no service."""

from __future__ import annotations

from headrace.app.app import App
from headrace.config.whole_file import WholeFile
from headrace.feature import Feature, features, imported
from headrace.http.endpoint import endpoints_of
from headrace_devkit.testing import ManualClock

PATHS = {
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


async def test_it_adds_endpoints_and_no_consumer() -> None:
    """So the order in which services start and drain is that of the core."""
    assert App(WholeFile(), ManualClock()).process.parts["light4j"].services() == ()
