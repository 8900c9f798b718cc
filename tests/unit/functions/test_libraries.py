"""Libraries of a function: refused with the command that installs them, or installed at the start."""

from __future__ import annotations

import shlex
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid
from headrace.functions.libraries import is_install
from headrace.functions.load import load_function
from headrace.lifecycle import run_blocking

HANDLER = """
    import msgspec, tiny

    def handler(context, event):
        return [tiny.NAME, msgspec.__version__ != "0.0.1"]
"""


def wheel(folder: Path, name: str, version: str, code: str) -> None:
    """Write a wheel of one module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def needs_libraries(write_function: Callable[..., Path]) -> Path:
    """A function whose requirements are two wheels, one of them another version of what the worker uses."""
    folder = write_function(HANDLER, workers=2, outputTopic="out")
    wheel(folder, "tiny", "1.0", "NAME = 'tiny 1.0'\n")
    wheel(folder, "msgspec", "0.0.1", "__version__ = '0.0.1'\n")
    (folder / "requirements.txt").write_text(f"--no-index\n--find-links {folder}\ntiny==1.0\nmsgspec==0.0.1\n")
    return folder


def settings(folder: Path, libraries: str) -> HeadraceConfig:
    return HeadraceConfig(functions_libraries=libraries, state_dir=folder / "state")  # type: ignore[arg-type]


async def test_without_leave_a_function_is_refused_with_the_command(needs_libraries: Path, running: Any) -> None:
    """The command as it stands makes the libraries; then the function runs with them."""
    with pytest.raises(FunctionInvalid, match="names libraries that are not installed: run ") as refused:
        load_function(needs_libraries, settings(needs_libraries, "refuse"))
    command = refused.value.description.partition("run ")[2].partition("; functions_libraries")[0]
    assert "--target" in command
    await run_blocking(subprocess.run, command, shell=True, check=True, capture_output=True)
    async with running(needs_libraries, settings(needs_libraries, "refuse")) as function:
        await function.deliver(b"")
        assert [record.value for record in function.written] == [b"tiny 1.0", b"true"]
    assert load_function(needs_libraries, settings(needs_libraries, "shared")).libraries is None


async def test_libraries_are_installed_once_and_anew_when_the_file_changes(needs_libraries: Path, running: Any) -> None:
    """Two workers, one installation; a pinned version of what the worker itself uses does not break it."""
    install = settings(needs_libraries, "install")
    async with running(needs_libraries, install) as function:
        await function.deliver(b"")
        assert [record.value for record in function.written] == [b"tiny 1.0", b"true"]
    state = needs_libraries / "state" / "functions"
    assert len([path for path in state.iterdir() if path.is_dir()]) == 1
    wheel(needs_libraries, "tiny", "2.0", "NAME = 'tiny 2.0'\n")
    file = needs_libraries / "requirements.txt"
    file.write_text(file.read_text().replace("tiny==1.0", "tiny==2.0"))
    async with running(needs_libraries, install) as function:
        await function.deliver(b"")
        assert function.written[0].value == b"tiny 2.0"


async def test_an_installation_that_fails_is_a_start_error(needs_libraries: Path, running: Any) -> None:
    """Readiness has pip's words and the command; nothing half made is left."""
    file = needs_libraries / "requirements.txt"
    file.write_text(file.read_text().replace("tiny==1.0", "tiny==9.0"))
    async with running(needs_libraries, settings(needs_libraries, "install")) as function:
        await function.until(lambda: "not installed" in function.service.readiness().reason)
        reason = function.service.readiness().reason
        assert "No matching distribution found for tiny==9.0" in reason
        assert "-m pip install --target" in reason
    assert not [path for path in (needs_libraries / "state" / "functions").iterdir() if path.is_dir()]


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


@pytest.mark.parametrize(
    ("command", "installs"),
    [
        ("pip install a", True),
        ("pip3 install -r r.txt", True),
        ("python -m pip install a==1", True),
        ("pip install a; rm -r x", False),
        ("pip install $(x)", False),
        ("pip uninstall a", False),
        ("pip install 'a", False),
    ],
)
def test_which_commands_install(command: str, installs: bool) -> None:
    """No shell is run for them."""
    assert is_install(command) is installs


async def test_a_state_folder_that_cannot_be_made_is_named(needs_libraries: Path, running: Any) -> None:
    """The function is not ready, and the process lives."""
    (needs_libraries / "state").write_text("a file")
    async with running(needs_libraries, settings(needs_libraries, "install")) as function:
        await function.until(lambda: "cannot be started" in function.service.readiness().reason)


def test_what_an_editor_leaves_in_the_folder_is_no_requirement(needs_libraries: Path) -> None:
    """A link to nothing, as an open file of an editor has, and a folder."""
    (needs_libraries / ".#requirements.txt").symlink_to("me@there.1:2")
    (needs_libraries / "old.txt").mkdir()
    assert load_function(needs_libraries, settings(needs_libraries, "install")).libraries


async def test_a_command_that_was_interrupted_begins_again(needs_libraries: Path, running: Any) -> None:
    """What it left is no folder of libraries, so the start is refused until the command has ended."""
    refuse = settings(needs_libraries, "refuse")
    for _ in range(2):
        with pytest.raises(FunctionInvalid, match="names libraries that are not installed: run ") as refused:
            load_function(needs_libraries, refuse)
        command = refused.value.description.partition("run ")[2].partition("; functions_libraries")[0]
        target = Path(shlex.split(command)[shlex.split(command).index("--target") + 1])
        target.mkdir(parents=True, exist_ok=True)  # as pip has made it when it is killed
        (target / "tiny.py").touch()
    await run_blocking(subprocess.run, command, shell=True, check=True, capture_output=True)
    async with running(needs_libraries, refuse) as function:
        await function.deliver(b"")
        assert function.written[0].value == b"tiny 1.0"
