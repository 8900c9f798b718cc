"""Programs of Debian that tests run: of this machine, or unpacked from a package without installing it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def debian_program(name: str, package: str) -> str:
    """Return the path of a program; without network or Debian the test is skipped."""
    if found := shutil.which(name):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests" / package
    if not (program := cache / "usr/bin" / name).exists():
        partial = cache.with_name(f"{package}.{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
                pytest.skip(f"no {name} here, and no apt-get to fetch it: install {package}")
            done = subprocess.run(["apt-get", "download", package], cwd=partial, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no {name} here, and apt-get download {package} failed: {done.stderr.strip()[-200:]}")
            for file in partial.glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", file, partial], check=True)
            if not cache.exists():
                partial.rename(cache)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return str(program)
