"""Which libraries a function needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from headrace.config.model import HeadraceConfig
from headrace.functions.load import load_function
from tests.function_workers import Running, Write
from yaml_table import table


@pytest.fixture
def needy(write_function: Write) -> Path:
    """A function with requirements."""
    folder = write_function("def handler(context, event): pass")
    (folder / "requirements.txt").write_text("tiny==1.0\n")
    return folder


def settings(folder: Path, libraries: str) -> HeadraceConfig:
    return HeadraceConfig(functions_libraries=libraries, state_dir=folder / "state")  # type: ignore[arg-type]


@pytest.mark.parametrize(("command", "arguments"), table(__file__, "commands_of_the_build_are_requirements"))
def test_commands_of_the_build_are_requirements(
    write_function: Write, caplog: pytest.LogCaptureFixture, command: str, arguments: list[str] | None
) -> None:
    """`pip install` counts; any other command is named and not run, and no shell is run for one."""
    build = {"commands": [command], "timestamp": 1}
    folder = write_function("def handler(context, event): pass", spec={"build": build})
    libraries = load_function(folder, settings(folder, "install")).libraries
    assert (list(libraries.arguments) if libraries else None) == arguments
    assert (f"{command!r}: only `pip install ...` has an effect" in caplog.text) == (libraries is None)


async def test_a_state_folder_that_cannot_be_made_is_named(
    needy: Path, running: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """The function is not ready, and the process lives."""
    (needy / "state").write_text("a file")
    async with running(needy, settings(needy, "install")) as function:
        await function.until(lambda: "failed to start" in function.service.readiness().reason)


def test_files_of_an_editor_are_not_requirements(needy: Path) -> None:
    """A link to nothing, as an open file of an editor has, and a folder."""
    (needy / ".#requirements.txt").symlink_to("me@there.1:2")
    (needy / "old.txt").mkdir()
    assert load_function(needy, settings(needy, "install")).libraries
