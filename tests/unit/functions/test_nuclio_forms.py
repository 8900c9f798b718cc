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


def settings(folder: Path, **others: Any) -> HeadraceConfig:
    return HeadraceConfig(state_dir=folder / "state", **others)


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


def test_a_variable_is_read_from_the_folder_of_secrets(write_function: Callable[..., Path], tmp_path: Path) -> None:
    """As a volume is: a folder for each secret or ConfigMap, a file for each key; one that is optional may be missing.

    A variable from elsewhere is left out: an empty one would mislead the handler.
    """
    for name, text in {"api": "hidden", "shop": "open"}.items():
        (tmp_path / "secrets" / name).mkdir(parents=True)
        (tmp_path / "secrets" / name / "key").write_text(f"{text}\n")
    one = {"name": "ONE", "valueFrom": {"secretKeyRef": {"name": "api", "key": "key"}}}
    two = {"name": "TWO", "valueFrom": {"secretKeyRef": {"name": "api", "key": "none", "optional": True}}}
    three = {"name": "THREE", "valueFrom": {"configMapKeyRef": {"name": "shop", "key": "key"}}}
    four = {"name": "FOUR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    folder = write_function("def handler(context, event): ...\n", spec={"env": [one, two, three, four]})
    spec = load_function(folder, settings(folder, functions_secrets_dir=tmp_path / "secrets"))
    assert spec.env == {"ONE": "hidden", "THREE": "open"}


@pytest.mark.parametrize(("before", "after", "problem"), table(__file__, "a_wrong_comment_has_its_line"))
def test_a_wrong_comment_has_its_line(tmp_path: Path, before: str, after: str, problem: str) -> None:
    """Lines are those of the source."""
    (tmp_path / "hello.py").write_text(INLINE.replace(before, after))
    with pytest.raises(FunctionInvalid) as refused:
        load_function(tmp_path / "hello.py")
    assert problem in refused.value.description


@pytest.mark.parametrize(("spec", "secrets", "problem"), table(__file__, "a_wrong_source_or_secret_is_named"))
def test_a_wrong_source_or_secret_is_named(
    write_function: Callable[..., Path], spec: dict[str, Any], secrets: bool, problem: str
) -> None:
    """With what to do; an empty variable would fail at the first event."""
    folder = write_function("def handler(context, event): ...\n", spec=spec)
    others = {"functions_secrets_dir": folder} if secrets else {}
    with pytest.raises(FunctionInvalid) as refused:
        load_function(folder, settings(folder, **others), check_handler=True)
    assert problem.format(folder=folder) in refused.value.description
