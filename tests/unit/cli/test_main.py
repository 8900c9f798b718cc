from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from headrace import extras
from headrace.cli import main as main_module
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.status import Poll, page
from headrace.errors import ConfigError, FunctionInvalid, KafkaUnavailable
from tests.command_line import headrace
from yaml_table import table


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """A command `topics` that raises what it is given."""

    def install(cause: BaseException) -> None:
        @click.command(cls=HeadraceCommand)
        def topics() -> None:
            raise cause

        monkeypatch.setattr(main_module._Lazy, "get_command", lambda *_: topics)

    return install


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the import fails: in a function of the command, or later."""
    failing(ModuleNotFoundError("No module named 'psycopg.rows'", name="psycopg.rows"))
    assert headrace("topics") == 1
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "headrace_console.serve", raising=False)
    for module in ("uvicorn", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    assert [headrace("console", "--url", "http://h"), headrace("sql", "SELECT 1")] == [1, 1]
    lines = capsys.readouterr().err.splitlines()
    named = [("psycopg.rows", "postgres"), ("uvicorn", "console"), ("pyarrow", "queries")]
    assert [line.partition("needs the package ")[2] for line in lines] == [
        f"{module}: pip install 'headrace[{extra}]'" for module, extra in named
    ]


@pytest.mark.parametrize(
    "cause", [ImportError("cannot import name 'X'"), ModuleNotFoundError("no X", name="headrace.x")]
)
def test_a_guest_of_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    cause: Exception,
) -> None:
    """`pip install -U headrace` leaves the guests as they are, with a warning only."""
    failing(cause)
    monkeypatch.setattr(extras, "version", lambda name: "0.1.9" if name == "headrace-queries" else "0.2.0")
    assert headrace("topics") == 1
    said = f"headrace-queries 0.1.9 does not fit headrace 0.2.0 ({type(cause).__name__}: {cause})"
    assert capsys.readouterr().err == f"{said}: pip install 'headrace[queries]==0.2.0'\n"


BARE = """
import asyncio, sys
from headrace.cli.run import _check
from headrace.app.app import App
from headrace.config.whole_file import WholeFile
from headrace.runtime import SystemClock
_check(None, WholeFile())
async def make(): App(WholeFile(), SystemClock())
asyncio.run(make())
files = {name.split(".")[0]: str(getattr(one, "__file__", "")) for name, one in sys.modules.items()}
optional = ("headrace.functions.", "headrace_pipelines.", "headrace_queries.", "headrace.admin.health.backend_check")
print(*[name for name, file in files.items() if "-packages" in file])
print(*[name for name in sys.modules if name.startswith(optional)])
"""


def test_a_bare_sidecar_imports_only_what_its_file_names() -> None:
    """Each library and part here costs every start its time, and every process its memory."""
    found = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True).stdout.split()
    needed = "annotated_types cachetools click confluent_kafka httptools msgspec prometheus_client pydantic"
    needed += " pydantic_core typing_extensions typing_inspection uvloop yaml"
    parts = "functions.feature functions.function_parts functions.function_checks"
    parts += " pipelines.report pipelines.routes pipelines.feature pipelines.pipeline_parts pipelines.pipeline_checks"
    parts += " pipelines.pipeline_sections queries.feature queries.query_parts queries.query_checks"
    parts += " queries.query_sections queries.standing_query queries.table_config queries.ksqldb_config"
    found = [name.removeprefix("headrace.").removeprefix("headrace_") for name in found]
    assert {*found} - {"_distutils_hack", "_virtualenv"} <= {*needed.split(), *parts.split()}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["zzz"], "No such command 'zzz'.\n"),
        (["topcs"], "No such command 'topcs'. Did you mean 'topics'?"),
        (["topics", "nope"], "--help"),
        (["topics", "list", "--nope"], "--help"),
        (["consume"], "--help"),
    ],
)
def test_wrong_usage_exits_2_with_a_hint(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command with the nearest name, or the way to the help."""
    assert headrace(*words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cause", "code", "said"),
    [
        (ConfigError("headrace.yaml:1: wrong"), 78, "headrace.yaml:1: wrong\n"),
        (FunctionInvalid("f.yaml: wrong"), 78, "f.yaml: wrong\n"),
        (KafkaUnavailable("no broker"), 1, "no broker\n"),
        (RuntimeError("oops"), 1, "A defect of Headrace: RuntimeError: oops. Please report it"),
    ],
)
def test_errors_are_one_paragraph_and_an_exit_code(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str], cause: Exception, code: int, said: str
) -> None:
    """What fails is told on standard error without a traceback; configuration has its own code."""
    failing(cause)
    assert headrace("topics") == code
    captured = capsys.readouterr()
    assert captured.err.startswith(said)
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("words", [["--debug", "topics"], ["topics", "--debug"]])
def test_debug_adds_the_traceback(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """The flag works before and after the command."""
    failing(KafkaUnavailable("no broker"))
    assert headrace(*words) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_exits_130_at_once(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends the process without waiting for threads that are still busy."""
    failing(KeyboardInterrupt())
    codes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", lambda code: codes.append(code) or sys.exit(code))
        assert headrace("topics") == 130
    assert codes == [130]
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(("output", "code"), [(">/dev/full", "1"), (">&-", "0")])
def test_output_that_cannot_be_written_is_not_a_defect(output: str, code: str) -> None:
    """A full disk is an error, also at the last flush; an output that the parent has closed gets nothing."""
    script = f"{sys.executable} -m headrace.cli.main config schema {output}; echo $? >&2"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    full = "cannot write the output: No space left on device\n" if code == "1" else ""
    assert done.stderr == f"{full}{code}\n"


@pytest.mark.parametrize("words", ["run -c headrace.yaml", "-c headrace.yaml run"])
def test_a_run_that_gets_a_signal_while_it_starts_ends_with_0(words: str, tmp_path: Path) -> None:
    """A rolling restart may send one at any moment; there is nothing to drain."""
    file = tmp_path / "headrace.yaml"
    os.mkfifo(file)
    with subprocess.Popen([sys.executable, "-m", "headrace.cli.main", *words.split()], cwd=tmp_path) as process:
        limit, opened = time.monotonic() + 60, None
        while opened is None and process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(OSError):  # until it reads the file
                opened = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        assert opened is not None
        process.terminate()
        os.close(opened)  # a read that began between the signal and its handler would wait for ever
        assert process.wait(60) == 0


SIGNALLED = table(__file__, "signalled")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_pipeline_command_cleans_up_after_a_signal(name: str) -> None:
    """The temporary folder of its driver holds secrets, and must not stay when a terminal is closed."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED, name], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("removed\n", "interrupted\n", 130)


@pytest.mark.parametrize(
    ("readiness", "state"),
    [
        ({"ready": False}, "not ready; its services are shown to known callers only"),
        ({"ready": True, "services": {"kafka": {"ready": True}}}, "ready, 1 of 1 service"),
        ({}, "its readiness is not known"),
    ],
)
def test_status_says_no_more_than_it_knows(readiness: dict[str, Any], state: str) -> None:
    """A caller without a token sees no services, and a process that is not ready is not called ready."""
    assert (
        page("http://h", Poll(0.0, {"readiness": readiness}, {}), None).splitlines()[0].endswith(f"http://h: {state}")
    )
