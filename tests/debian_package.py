"""Programs of Debian that tests run: of this machine, or unpacked from a package without installing it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def debian_program(name: str, package: str, *, libraries: bool = False) -> str:
    """Return the path of a program; without network or Debian the test is skipped.

    With `libraries` the packages that it needs and this machine lacks are unpacked beside it: see `library_path`.
    """
    if found := shutil.which(name):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests" / package
    if not (program := cache / "usr/bin" / name).exists():
        partial = cache.with_name(f"{package}.{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
                pytest.skip(f"no {name} here, and no apt-get to fetch it: install {package}")
            packages = _with_needed(package) if libraries else [package]
            done = subprocess.run(["apt-get", "download", *packages], cwd=partial, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no {name} here, and apt-get download {package} failed: {done.stderr.strip()[-200:]}")
            for file in partial.glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", file, partial], check=True)
            if not cache.exists():
                partial.rename(cache)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return str(program)


def library_path(program: str) -> str:
    """Return the folders of the libraries that were unpacked beside a program."""
    return ":".join(sorted({str(file.parent) for file in Path(program).parents[1].glob("lib/*-linux-gnu/**/*.so*")}))


def _with_needed(package: str) -> list[str]:
    plan = ["apt-get", "install", "-s", "--no-install-recommends", package]
    lines = subprocess.run(plan, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[1] for line in lines if line.startswith("Inst ")] or [package]
