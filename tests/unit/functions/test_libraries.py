"""Which libraries a function needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yaml_table import table

from headrace.config.model import HeadraceConfig
from headrace.functions.libraries import is_install
from headrace.functions.load import load_function


@pytest.fixture
def needy(write_function: Callable[..., Path]) -> Path:
    """A function with requirements."""
    folder = write_function("def handler(context, event): pass")
    (folder / "requirements.txt").write_text("tiny==1.0\n")
    return folder


def settings(folder: Path, libraries: str) -> HeadraceConfig:
    return HeadraceConfig(functions_libraries=libraries, state_dir=folder / "state")  # type: ignore[arg-type]


def test_commands_of_the_build_are_requirements(
    write_function: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """`pip install` counts; any other command is named and not run."""
    build = {"commands": ["pip install 'tiny==1.0' --no-index", "apt-get install gcc"], "timestamp": 1}
    folder = write_function("def handler(context, event):\n    pass\n", spec={"build": build})
    spec = load_function(folder, settings(folder, "install"))
    assert spec.libraries
    assert [*spec.libraries.arguments] == ["tiny==1.0", "--no-index"]
    assert "'apt-get install gcc': only `pip install ...` has an effect" in caplog.text


@pytest.mark.parametrize(("command", "installs"), table(__file__, "which_commands_install"))
def test_which_commands_install(command: str, installs: bool) -> None:
    """No shell is run for them."""
    assert is_install(command) is installs


async def test_a_state_folder_that_cannot_be_made_is_named(needy: Path, running: Any) -> None:
    """The function is not ready, and the process lives."""
    (needy / "state").write_text("a file")
    async with running(needy, settings(needy, "install")) as function:
        await function.until(lambda: "failed to start" in function.service.readiness().reason)


def test_what_an_editor_leaves_in_the_folder_is_no_requirement(needy: Path) -> None:
    """A link to nothing, as an open file of an editor has, and a folder."""
    (needy / ".#requirements.txt").symlink_to("me@there.1:2")
    (needy / "old.txt").mkdir()
    assert load_function(needy, settings(needy, "install")).libraries
