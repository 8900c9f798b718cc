"""The wheel: what is in it, and that it works in an environment of its own, alone and with each extra."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace_devkit.testing import Cluster, MakeTopic

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMPORTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""Extras that are installed from the index, and what they make importable; the others are hundreds of megabytes."""


def output(*command: str | Path, **options: Any) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADRACE"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of a copy of the source, built without the network; one template is hidden."""
    copy, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=unwanted, dirs_exist_ok=True)
    hidden = copy / "packages/headrace-devkit/src/headrace_devkit/templates/hidden/.gitignore"
    hidden.parent.mkdir(parents=True)
    hidden.touch()
    words = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy)
    output(sys.executable, "-m", "pip", "wheel", *words)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh environment with the wheel and what it needs from the index."""
    folder = tmp_path_factory.mktemp("core") / "env"
    output(sys.executable, "-m", "venv", folder)
    output(folder / "bin/python", "-m", "pip", "install", "--quiet", wheel)
    return folder


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    """Modules, data and files that begin with a dot; no tests."""
    source = ROOT / "src" / "headrace"
    files = {str(path.relative_to(source.parent)) for path in source.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name} | {"headrace/cli/templates/hidden/.gitignore"}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if not re.match(r"headrace-[\d.]+\.(data|dist-info)/", name)} == wanted


@pytest.mark.parametrize("extra", sorted({*EXTRAS} - {"java", "dev"}))  # some packages of these are for some machines
def test_the_locked_packages_fit_each_extra(extra: str) -> None:
    """So what is tested is what `pip install 'headrace[...]'` may choose."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    needs = [need for need in map(Requirement, EXTRAS[extra]) if not need.marker or need.marker.evaluate()]
    others = [need for need in needs if need.name != "headrace"]
    assert [str(need) for need in others if locked.get(canonicalize_name(need.name), "no") not in need.specifier] == []


@pytest.mark.long
def test_the_core_alone_works(core: Path, kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> None:
    """Help, a check of the file, and records to and from a broker."""
    program, name = core / "bin/headrace", topic(1)
    (tmp_path / "headrace.yaml").write_text(f"kafka: {{bootstrap_servers: '{kafka.bootstrap_servers}'}}\n")
    assert "Commands:" in output(program, "--help", cwd=tmp_path)
    assert "headrace.yaml: ok" in output(program, "config", "check", cwd=tmp_path)
    assert output(program, "produce", name, input="one\n", cwd=tmp_path) == f"1 record acknowledged in {name}\n"
    assert output(program, "consume", name, cwd=tmp_path) == "one\n"


@pytest.mark.long
@pytest.mark.parametrize("extra", IMPORTS)
def test_each_extra_installs(extra: str, core: Path, wheel: Path, tmp_path: Path) -> None:
    """A copy of the core's environment takes it, without conflicts, and has what it is for."""
    shutil.copytree(core, tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    output(python, "-m", "pip", "install", "--quiet", f"headrace[{extra}] @ {wheel.as_uri()}")
    output(python, "-m", "pip", "check")
    output(python, "-c", f"import {IMPORTS[extra]}", cwd=tmp_path)
