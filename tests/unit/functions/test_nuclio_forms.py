"""Functions with the configuration in their source, the source in their configuration, or secrets in variables."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function
from tests.function_workers import Running
from yaml_table import table

INLINE = table(__file__, "inline")
CODE = 'def handler(context, event):\n    return {"source": event.body.decode()}\n'


def settings(folder: Path) -> HeadraceConfig:
    return HeadraceConfig(state_dir=folder / "state")


@pytest.mark.parametrize("space", [" ", ""])
async def test_a_comment_of_the_source_is_the_configuration(
    tmp_path: Path, running: Callable[..., AbstractAsyncContextManager[Running]], space: str
) -> None:
    """With and without a blank behind `#`; the handler is `handler` in this file unless it names another."""
    file = tmp_path / "hello.py"
    file.write_text(INLINE.replace("\n# ", f"\n#{space}"))
    async with running(file) as function:
        assert (function.service.spec.name, function.service.spec.handler) == ("counts", "hello:handler")
        await function.deliver(b"41")
        assert [record.value for record in function.written] == [b"42"]


async def test_an_exported_function_has_its_source_in_the_configuration(
    write_function: Callable[..., Path], running: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """It is written below the state folder under the handler's name."""
    source = base64.encodebytes(CODE.encode()).decode()
    build = {"functionSourceCode": source, "codeEntryType": "sourceCode"}
    folder = write_function("", spec={"handler": "exported_source:handler", "build": build}, outputTopic="out")
    assert load_function(folder, settings(folder), check_handler=True)
    async with running(folder, settings(folder)) as function:
        await function.deliver(b"v")
        assert [record.value for record in function.written] == [b'{"source":"v"}']
    assert [path.name for path in folder.glob("state/functions/*/*.py")] == ["exported_source.py"]


def test_a_variable_from_elsewhere_is_left_out_and_named(
    write_function: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the environment has it: workers get that. An empty one would mislead the handler."""
    monkeypatch.setenv("ONE", "hidden")
    one = {"name": "ONE", "valueFrom": {"secretKeyRef": {"name": "api", "key": "key"}}}
    two = {"name": "TWO", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    folder = write_function("def handler(context, event): ...\n", spec={"env": [one, two]})
    assert load_function(folder).env == {}
    assert [record.getMessage().partition(" ")[2] for record in caplog.records] == [
        "spec.env[1].valueFrom: is not read: set TWO in the environment of Headrace, which handlers have"
    ]


@pytest.mark.parametrize(("before", "after", "problem"), table(__file__, "a_wrong_comment_has_its_line"))
def test_a_wrong_comment_has_its_line(tmp_path: Path, before: str, after: str, problem: str) -> None:
    """Lines are those of the source."""
    (tmp_path / "hello.py").write_text(INLINE.replace(before, after))
    with pytest.raises(FunctionInvalid) as refused:
        load_function(tmp_path / "hello.py")
    assert problem in refused.value.description


@pytest.mark.parametrize(("spec", "problem"), table(__file__, "a_wrong_source_is_named"))
def test_a_wrong_source_is_named(write_function: Callable[..., Path], spec: dict[str, Any], problem: str) -> None:
    """With what to do."""
    folder = write_function("def handler(context, event): ...\n", spec=spec)
    with pytest.raises(FunctionInvalid) as refused:
        load_function(folder, settings(folder), check_handler=True)
    assert problem.format(folder=folder) in refused.value.description
