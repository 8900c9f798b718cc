"""A function that is changed while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic
from headrace_devkit.testing.forked import ForkedHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file

HANDLER = "def handler(context, event):\n    pass\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a function in a folder of its own: `write(name, source, code, spec={...}, **attributes)`."""

    def write(name: str, source: str, code: str, *, spec: Any = None, **attributes: Any) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        group = {"topics": [source], "consumerGroup": f"{source}-{name}", **attributes}
        triggers = {"in": {"kind": "kafka-cluster", "numWorkers": 1, "attributes": group}}
        return function_file(folder, code, triggers, name=name, **(spec or {}))

    return write


class RunFunction(ForkedHeadrace):
    """`headrace function run FILE --reload`."""

    file = ""

    def _launch(self, words: Sequence[str]) -> None:
        super()._launch(["function", "run", self.file, "--reload", *words[1:]])


def test_a_function_reloads_while_it_is_written_and_stays_in_its_group(
    site: Scenario, topic: MakeTopic, write: Callable[..., str], tmp_path: Path
) -> None:
    """`headrace function run --reload`: a change serves the next record, a broken one keeps the old worker."""
    source, target = topic(), topic()
    code = "def handler(context, event):\n    return '{}'\n"
    process = RunFunction(site.config, tmp_path / "run")
    process.file = write("work", source, code.format("first"), outputTopic=target)

    def responses_with(text: str) -> bool:
        before = len(site.records(target))
        site.write(source, OutgoingRecord(source, b"k", b""))
        site.wait_until(lambda: len(site.records(target)) > before, "a response")
        return bool(site.records(target)[-1].value == text.encode())

    def changes() -> list[str]:
        lines = str(site.ask(f"{process.url}/metrics").body).splitlines()
        return [line for line in lines if 'event="assignment_change"' in line]

    process.start()
    try:
        process.wait_ready()
        assert responses_with("first")
        at_first = changes()
        assert at_first
        write("work", source, code.format("second, which is longer"), outputTopic=target)
        site.wait_until(lambda: responses_with("second, which is longer"), "the response of the changed file")
        write("work", source, "def handler(context, event)\n    return 'third'\n", outputTopic=target)
        site.wait_until(lambda: "keeping the old workers" in process.output, "the broken file is named")
        assert responses_with("second, which is longer")
        response = site.ask(f"{process.url}/adm/modules", ["function work"])
        assert "does not compile" in response.body["failed"]["function work"]
        write("work", source, code.format("the fourth, which is longer still"), outputTopic=target)
        response = site.ask(f"{process.url}/adm/modules", ["function work"])
        assert response.body == {"reloaded": ["function work"], "failed": {}}
        site.wait_until(lambda: responses_with("the fourth, which is longer still"), "the response after the request")
        assert changes() == at_first, "the consumer has stayed in its group"
    finally:
        process.terminate()
