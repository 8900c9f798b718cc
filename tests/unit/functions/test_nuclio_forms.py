"""Functions with the configuration in their source, the source in their configuration, or secrets in variables."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yaml_table import table

from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function

INLINE = table(__file__, "inline")
CODE = 'def handler(context, event):\n    return {"source": event.body.decode()}\n'


def settings(folder: Path, **others: Any) -> HeadraceConfig:
    return HeadraceConfig(state_dir=folder / "state", **others)


def build(source: str, handler: str = "exported_source:handler") -> dict[str, Any]:
    """Return the spec of a function file that has its source, and no module."""
    return {"handler": handler, "build": {"functionSourceCode": source, "codeEntryType": "sourceCode"}}


@pytest.mark.parametrize("space", [" ", ""])
async def test_a_comment_of_the_source_is_the_configuration(tmp_path: Path, running: Any, space: str) -> None:
    """With and without a blank behind `#`; the handler is `handler` in this file unless it names another."""
    file = tmp_path / "hello.py"
    file.write_text(INLINE.replace("\n# ", f"\n#{space}"))
    async with running(file) as function:
        assert (function.service.spec.name, function.service.spec.handler) == ("counts", "hello:handler")
        await function.deliver(b"41")
        assert [record.value for record in function.written] == [b"42"]


async def test_an_exported_function_has_its_source_in_the_configuration(
    write_function: Callable[..., Path], running: Any
) -> None:
    """It is written below the state folder under the handler's name."""
    folder = write_function("", spec=build(base64.encodebytes(CODE.encode()).decode()), outputTopic="out")
    assert load_function(folder, settings(folder), check_handler=True)
    async with running(folder, settings(folder)) as function:
        await function.deliver(b"v")
        assert [record.value for record in function.written] == [b'{"source":"v"}']
    assert [path.name for path in folder.glob("state/functions/*/*.py")] == ["exported_source.py"]


def test_a_variable_is_read_from_the_folder_of_secrets(write_function: Callable[..., Path], tmp_path: Path) -> None:
    """As a volume is: a folder for each secret, a file for each key; one that is optional may be missing."""
    (tmp_path / "secrets/api").mkdir(parents=True)
    (tmp_path / "secrets/api/key").write_text("hidden\n")
    one = {"name": "ONE", "valueFrom": {"secretKeyRef": {"name": "api", "key": "key"}}}
    two = {"name": "TWO", "valueFrom": {"secretKeyRef": {"name": "api", "key": "none", "optional": True}}}
    folder = write_function("def handler(context, event): ...\n", spec={"env": [one, two]})
    spec = load_function(folder, settings(folder, functions_secrets_dir=tmp_path / "secrets"))
    assert spec.env == {"ONE": "hidden"}


WRONG = [
    (
        INLINE.replace("consumerGroup: g", "consumerGruop: g"),
        "hello.py:13: spec.triggers.kafka.attributes.consumerGruop",
    ),
    (INLINE.replace("metadata: {", "metadata: }{"), "hello.py:7: is not YAML"),
    (INLINE.replace("@nuclio.configure", "@nuclio.other"), "hello.py: has no comment `# @nuclio.configure`"),
    (INLINE.replace("function.yaml:", "build.yaml:"), "hello.py: has no comment `# @nuclio.configure`"),
]


@pytest.mark.parametrize(("code", "problem"), WRONG)
def test_a_wrong_comment_has_its_line(tmp_path: Path, code: str, problem: str) -> None:
    """Lines are those of the source."""
    (tmp_path / "hello.py").write_text(code)
    with pytest.raises(FunctionInvalid) as refused:
        load_function(tmp_path / "hello.py")
    assert problem in refused.value.description


def secret(**reference: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": {"secretKeyRef": reference}}]}


SECRET = "spec.env[0].valueFrom.secretKeyRef: "


@pytest.mark.parametrize(
    ("spec", "secrets", "problem"),
    [
        (build("@@"), True, "spec.build.functionSourceCode: is not the base64 of a source: write what"),
        (build("/w=="), True, "spec.build.functionSourceCode: is not the base64 of a source"),
        (build("eA==", "a.b:f"), True, "spec.handler: names module a.b, and functionSourceCode is one module: write"),
        (build("ZGVmIGhhbmRsZSgpOiAuLi4="), True, "which {folder}/state/functions/"),
        (secret(name="api", key="key"), False, "set functions_secrets_dir in headrace.yaml"),
        (secret(name="api", key="key"), True, "file not found, or not a plain file: {folder}/api/key"),
        (secret(name="api"), True, SECRET + "has key None: write the name and key of a secret"),
        (secret(name="api", key="../key"), True, SECRET + "has key ../key"),
    ],
)
def test_a_wrong_source_or_secret_is_named(
    write_function: Callable[..., Path], spec: dict[str, Any], secrets: bool, problem: str
) -> None:
    """With what to do; an empty variable would fail at the first event."""
    folder = write_function("def handler(context, event): ...\n", spec=spec)
    others = {"functions_secrets_dir": folder} if secrets else {}
    with pytest.raises(FunctionInvalid) as refused:
        load_function(folder, settings(folder, **others), check_handler=True)
    assert problem.format(folder=folder) in refused.value.description
