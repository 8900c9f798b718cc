import json
from pathlib import Path

import pytest

from tests.command_line import headrace
from yaml_table import table

FUNCTION = """\
spec:
  handler: nowhere:copyfile
  triggers: {k: {kind: kafka, attributes: {topics: [t], consumerGroup: f}}}
"""
PIPELINE = """\
name: p
sources: {flights: {topic: flights, schema: carrier STRING}}
flows: {f: {sql: SELECT carrier FROM flights, sink: {topic: out}}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PW", "hunter2")
    return tmp_path


@pytest.mark.parametrize(("text", "problem"), table(__file__, "check_of_a_bad_file"))
def test_check_of_a_bad_file(folder: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str) -> None:
    """An unusable file is exit code 78 and its problems, also as JSON."""
    (folder / "headrace.yaml").write_text(text)
    assert headrace("config", "check") == 78
    assert capsys.readouterr().err.startswith(problem)
    assert headrace("config", "check", "--output", "json") == 78
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["problems"][0].startswith(problem)


def test_check_looks_into_the_files_that_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems of headrace.yaml, of missing files and of function and pipeline files come at once, file by file."""
    text = "functions: [f.yaml, g.yaml, gone.yaml]\npipelines: [p.yaml]\nhttp: {port: many}\nhttpp: {}"
    (folder / "headrace.yaml").write_text(text)
    (folder / "f.yaml").write_text("spec: [1]")
    (folder / "g.yaml").write_text(FUNCTION)
    (folder / "p.yaml").write_text("nmae: x\nsources: 3")
    assert headrace("config", "check") == 78
    problems = capsys.readouterr().err
    assert "g.yaml:2: spec.handler: names module nowhere, which is neither in" in problems
    printed = [line.split(": ")[0].replace(f"{folder}/", "") for line in problems.splitlines()]
    assert printed[:4] == ["headrace.yaml:1", "headrace.yaml:3", "headrace.yaml:4", "f.yaml:1"]
    assert {"p.yaml:1", "p.yaml:2"} <= set(printed)


def test_check_says_what_run_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warnings of consumers and functions, and the refusals that come up when the parts are put together."""
    consumer = "{topics: [t], group: g, backend: {url: 'http://h'}, consumer: {properties: {group.protocol: consumer}}}"
    shared = "kafka: {properties: {session.timeout.ms: 9000}}"
    (folder / "headrace.yaml").write_text(f"functions: [f.yaml]\n{shared}\nreactive_consumers: {{a: {consumer}}}")
    (folder / "f.yaml").write_text(FUNCTION.replace("nowhere", "shutil") + "  image: python\n")
    assert headrace("config", "check") == 0
    printed = capsys.readouterr().err
    assert "warning: reactive a: session.timeout.ms has no effect with group.protocol consumer" in printed
    assert printed.count("f.yaml:1: spec: without effect in Headrace: image") == 1
    (folder / "headrace.yaml").write_text("pipelines: [p.yaml]")
    (folder / "p.yaml").write_text(f"{PIPELINE}\nkafka: {{security: {{tls: {{verify_certificate: false}}}}}}")
    assert headrace("config", "check") == 78
    assert "tls.verify_certificate: unknown key" in capsys.readouterr().err
