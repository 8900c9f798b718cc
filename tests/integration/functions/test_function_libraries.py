"""Libraries of a function that pip installs: by the command that a refusal names, or at the start."""

from __future__ import annotations

import socket
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from headrace.config.model import HeadraceConfig
from headrace.functions.load import load_function
from headrace.runtime import run_blocking
from headrace_devkit.testing.forked import run_command
from tests.function_workers import Running
from yaml_table import table

HANDLER = """
    import msgspec, tiny

    def handler(context, event):
        return [tiny.NAME, msgspec.__version__ != "0.0.1"]
"""


PACKAGE = table(__file__, "package")
PACKAGE_HANDLER = table(__file__, "package_handler")


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


def test_every_command_refuses_a_function_until_its_libraries_are_installed(needs_libraries: Path) -> None:
    """Also without a headrace.yaml; `function validate --install` installs them, and `function test` finds them."""

    def headrace(*words: str) -> tuple[int, str]:
        done = run_command(needs_libraries, "function", *words)
        return done.returncode, done.stdout + done.stderr

    file, partial = needs_libraries / "function.yaml", needs_libraries / ".headrace/state/functions/x.partial"
    for command in ("validate", "test", "run"):
        code, text = headrace(command)
        assert (code, f"run headrace function validate --install {file} " in text) == (78, True), text
    partial.mkdir(parents=True)  # as an installation that was interrupted leaves it
    (needs_libraries / "tiny-1.0-py3-none-any.whl").rename(needs_libraries / "moved")
    code, text = headrace("validate", "--install")
    assert (code, "No matching distribution found for tiny==1.0" in text) == (78, True), text
    assert headrace("validate")[0] == 78
    (needs_libraries / "moved").rename(needs_libraries / "tiny-1.0-py3-none-any.whl")
    assert headrace("validate", "--install")[0] == 0
    assert "already installed" in headrace("validate", "--install")[1]
    assert headrace("validate", "--partitions", "2")[0] == 0
    code, text = headrace("test", "--value", "v")
    assert (code, "tiny 1.0" in text) == (0, True), text
    assert load_function(needs_libraries, settings(needs_libraries, "shared")).libraries is None


async def test_libraries_are_installed_once_and_anew_when_the_file_changes(
    needs_libraries: Path, running: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """Two workers, one installation; a pinned version of what the worker itself uses does not break it.

    An installation that fails is a start error with pip's words and the command, and leaves nothing half made.
    """
    install, file = settings(needs_libraries, "install"), needs_libraries / "requirements.txt"

    def installed() -> int:
        return len([path for path in (needs_libraries / "state" / "functions").iterdir() if path.is_dir()])

    async with running(needs_libraries, install) as function:
        await function.deliver(b"")
        assert [record.value for record in function.written] == [b"tiny 1.0", b"true"]
    assert installed() == 1
    file.write_text(file.read_text().replace("tiny==1.0", "tiny==2.0"))
    async with running(needs_libraries, install) as function:
        await function.until(lambda: "failed to install" in function.service.readiness().reason)
        reason = function.service.readiness().reason
        assert (
            "No matching distribution found for tiny==2.0" in reason
            and "headrace function validate --install " in reason
        )
    assert installed() == 1
    wheel(needs_libraries, "tiny", "2.0", "NAME = 'tiny 2.0'\n")
    async with running(needs_libraries, install) as function:
        await function.deliver(b"")
        assert function.written[0].value == b"tiny 2.0"


async def test_a_stop_ends_pip(
    write_function: Callable[..., Path], running: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """It waits for an index that never answers; its folder does not count."""
    folder = write_function("def handler(context, event):\n    pass\n")
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        (folder / "requirements.txt").write_text(f"--index-url {url}\ntiny==1.0\n")
        async with running(folder, settings(folder, "install")) as function:
            accepted, _ = await run_blocking(index.accept)  # pip is at work
            began = time.monotonic()
        ended = await run_blocking(accepted.makefile("rb").read)
        assert time.monotonic() - began < 5
        assert ended.startswith(b"GET /simple/tiny")
        accepted.close()
    del function
    assert not [path for path in (folder / "state" / "functions").iterdir() if path.is_dir()]


async def test_classes_of_the_real_package_are_those_of_events(
    write_function: Callable[..., Path], running: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """A handler may test for them, return its Response, and acknowledge by its QualifiedOffset."""
    folder = write_function(PACKAGE_HANDLER, outputTopic="out")
    (folder / "nuclio_sdk.py").write_text(PACKAGE)
    async with running(folder) as function:
        await function.deliver(b"v")
        [output] = function.written
        assert output.headers == [("where", b"real")]
        assert output.value == b'[true,true,"ours of flights",["flights",3,0],"flights-3-0"]'
