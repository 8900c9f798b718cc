"""Commands that a signal ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import asyncio, contextlib, signal, sys
from headrace.cli import main as cli

@contextlib.asynccontextmanager
async def driver():
    try:
        yield
    finally:
        await asyncio.sleep(0)
        print("removed", flush=True)

async def work():
    async with driver():
        signal.raise_signal(getattr(signal, sys.argv[1]))
        await asyncio.sleep(10)

cli.root.main = lambda *_, **__: asyncio.run(work())
cli.main(["pipeline", "show", "tolls.yaml"])
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_pipeline_command_cleans_up_after_a_signal(name: str) -> None:
    """The temporary folder of its driver holds secrets, and must not stay when a terminal is closed."""
    done = subprocess.run([sys.executable, "-c", CODE, name], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("removed\n", "interrupted\n", 130)
