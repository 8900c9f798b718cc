"""Libraries of a function: in its folder, by the command that an error names."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from headrace.runtime import run_program
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


async def test_a_function_has_its_own_libraries_in_its_folder(
    needs_libraries: Path, running: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """Readiness names what installs them. A pinned version of what the worker itself uses does not break it."""
    arguments = ["--target", str(needs_libraries), "-r", str(needs_libraries / "requirements.txt")]
    async with running(needs_libraries) as function:
        await function.until(lambda: "No module named 'tiny'" in function.service.readiness().reason)
        command = f"{sys.executable} -m pip install {' '.join(arguments)}"
        assert f"to install libraries, run {command}" in function.service.readiness().reason
    code, text = run_program([sys.executable, "-m", "pip", "install", *arguments], 60)
    assert code == 0, text
    async with running(needs_libraries) as function:
        await function.deliver(b"")
        assert [record.value for record in function.written] == [b"tiny 1.0", b"true"]


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
