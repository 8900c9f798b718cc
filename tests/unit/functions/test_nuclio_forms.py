"""Functions with the configuration in their source, the source in their configuration, or secrets in variables."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function

INLINE = """\
# Adds one.
import os

#   @nuclio.configure
#
# function.yaml:
#   metadata: {name: counts}
#   spec:
#     runtime: python:3.9
#     triggers:
#       kafka:
#         kind: kafka-cluster
#         attributes: {topics: [flights], consumerGroup: g, outputTopic: out}
#

def handler(context, event):
    return int(event.body) + 1
"""
CODE = 'def handler(context, event):\n    return {"source": event.body.decode()}\n'


def settings(folder: Path, **others: Any) -> HeadraceConfig:
    return HeadraceConfig(state_dir=folder / "state", **others)


def exported(write_function: Callable[..., Path], source: str, handler: str = "exported_source:handler") -> Path:
    """Write a function file that has its source, and no module beside it."""
    build = {"functionSourceCode": source, "codeEntryType": "sourceCode"}
    return write_function("", spec={"handler": handler, "build": build}, outputTopic="out")


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
    folder = exported(write_function, base64.encodebytes(CODE.encode()).decode())
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


@pytest.mark.parametrize(
    ("source", "handler", "problem"),
    [
        ("@@", "code:handler", "spec.build.functionSourceCode: is not the base64 of a source: write what"),
        ("/w==", "code:handler", "spec.build.functionSourceCode: is not the base64 of a source"),
        ("eA==", "a.code:handler", "spec.handler: names module a.code, and functionSourceCode is one module: write"),
        ("ZGVmIGhhbmRsZSgpOiAuLi4=", "code:handler", "which {folder}/state/functions/"),
    ],
)
def test_a_wrong_source_is_named(write_function: Callable[..., Path], source: str, handler: str, problem: str) -> None:
    """Base64, the module's name, and what the module defines."""
    folder = exported(write_function, source, handler)
    with pytest.raises(FunctionInvalid) as refused:
        load_function(folder, settings(folder), check_handler=True)
    assert problem.format(folder=folder) in refused.value.description


@pytest.mark.parametrize(
    ("reference", "secrets", "problem"),
    [
        ({"name": "api", "key": "key"}, False, "set functions_secrets_dir in headrace.yaml"),
        ({"name": "api", "key": "key"}, True, "file not found, or not a plain file: {folder}/api/key"),
        ({"name": "api"}, True, "has key None: write the name and key of a secret"),
        ({"name": "api", "key": "../key"}, True, "has key ../key"),
    ],
)
def test_a_secret_that_is_missing_is_named(
    write_function: Callable[..., Path], tmp_path: Path, reference: Any, secrets: bool, problem: str
) -> None:
    """With what to do; an empty variable would fail at the first event."""
    env = [{"name": "A", "valueFrom": {"secretKeyRef": reference}}]
    folder = write_function("def handler(context, event): ...\n", spec={"env": env})
    others = {"functions_secrets_dir": tmp_path} if secrets else {}
    with pytest.raises(FunctionInvalid) as refused:
        load_function(folder, settings(folder, **others))
    assert "spec.env[0].valueFrom.secretKeyRef" in refused.value.description
    assert problem.format(folder=tmp_path) in refused.value.description
