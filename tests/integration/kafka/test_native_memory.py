"""The compiled module reads and writes no memory but its own: with the checks of the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "packages" / "headrace" / "native"
LIMIT_SECONDS = 300
RUN = """
import importlib.util, os, sys
os.environ.pop("LD_PRELOAD")  # brokers are started without it
spec = importlib.util.spec_from_file_location("headrace.kafka._columns", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
import pytest
sys.exit(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "tests", [["tests/unit/kafka/test_native_producer.py"], ["tests/integration/kafka/test_fetch_queue.py"]]
)
def test_the_sanitizers_find_nothing(tests: list[str], tmp_path: Path) -> None:
    """Address and undefined behaviour, over the fuzz of its inputs and over its contract on a broker."""
    include = subprocess.check_output([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"])
    made = tmp_path / "_columns.abi3.so"
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1", "-shared", "-fPIC"]
    sources = [str(path) for path in sorted(NATIVE.glob("*.c"))]
    subprocess.run(["gcc", *checks, f"-I{include.decode().strip()}", *sources, "-o", str(made)], check=True)
    preload = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in ("libasan.so",)
    ]
    variables = {"LD_PRELOAD": ":".join(preload), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(made), *tests],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    assert "AddressSanitizer" not in done.stderr
