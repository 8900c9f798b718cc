"""The wheels: what is in them, and that they work in an environment of their own, together and alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, MakeTopic, RecordingBackend

ROOT = Path(__file__).parents[3]
PACKAGES = {folder.name: folder for folder in sorted((ROOT / "packages").iterdir())}
FILES = {name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in PACKAGES.items()}
PROJECTS = {name: file["project"] for name, file in FILES.items()}
NEEDS = {(name, ""): project["dependencies"] for name, project in PROJECTS.items()} | {
    (name, extra): needs
    for name, project in PROJECTS.items()
    for extra, needs in project.get("optional-dependencies", {}).items()
}
"""What each package needs, and what each of its extras adds."""
CASES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def output(*command: str | Path, **options: Any) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADRACE"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the wheel of each package, built of a copy without the network; one template is hidden."""
    copy, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    unwanted = shutil.ignore_patterns("build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "packages", copy, ignore=unwanted, dirs_exist_ok=True)
    hidden = copy / "headrace-devkit/src/headrace_devkit/templates/hidden/.gitignore"
    hidden.parent.mkdir(parents=True)
    hidden.touch()
    words = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    output(sys.executable, "-m", "pip", "wheel", *words, *(copy / name for name in PACKAGES))
    return {path.name.partition("-")[0].replace("_", "-"): path for path in folder.iterdir()}


def environment(folder: Path, *needs: str | Path) -> Path:
    """Make an environment with packages and what they need of the index; return its folder of programs."""
    output(sys.executable, "-m", "venv", folder)
    output(folder / "bin/python", "-m", "pip", "install", "--quiet", *needs)
    output(folder / "bin/python", "-m", "pip", "check")
    return folder / "bin"


@pytest.fixture(scope="module")
def core(wheels: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the core alone."""
    return environment(tmp_path_factory.mktemp("core") / "env", wheels["headrace"])


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_has_every_file_of_its_package_and_nothing_else(name: str, wheels: Mapping[str, Path]) -> None:
    """Modules, data and files that begin with a dot; no tests. Its licence and its page for the index."""
    source = PACKAGES[name] / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    wanted = {file for file in files if not re.search(r"__pycache__|\.egg-info/", file)}
    if name == "headrace-devkit":
        wanted.add("headrace_devkit/templates/hidden/.gitignore")
    archive = zipfile.ZipFile(wheels[name])
    rest = re.compile(r"headrace[\w]*-[\d.]+\.(data|dist-info)/")
    assert {file for file in archive.namelist() if not rest.match(file)} == wanted
    (licence,) = (file for file in archive.namelist() if file.endswith("/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize(("name", "extra"), sorted(NEEDS.keys() - {("headrace", "java")}))
def test_the_locked_packages_fit(name: str, extra: str) -> None:
    """So what is tested is what `pip install 'headrace[...]'` may choose."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    others = [need for need in map(Requirement, NEEDS[name, extra]) if need.name not in PACKAGES]
    assert [str(need) for need in others if locked.get(canonicalize_name(need.name), "no") not in need.specifier] == []


def test_every_guest_is_installed_by_its_extra() -> None:
    """`headrace[queries]` installs headrace-queries, and so on."""
    for name in PACKAGES.keys() - {"headrace", "headrace-jvm"}:  # the last comes with those that need it
        (need,) = map(Requirement, NEEDS["headrace", name.removeprefix("headrace-")])
        assert need.name == name


@pytest.mark.long
def test_the_core_alone_produces_pushes_and_runs_a_function(
    core: Path, kafka: Cluster, topic: MakeTopic, backend: RecordingBackend, tmp_path: Path
) -> None:
    """A record over HTTP reaches a backend and a function, whose output reaches the topic that the command reads."""
    inputs, outputs, (port,) = topic(1), topic(1), free_ports(1)
    attributes = {"topics": [inputs], "consumerGroup": f"{inputs}-f", "outputTopic": outputs}
    function = {"handler": "shout:handler", "triggers": {"in": {"kind": "kafka", "attributes": attributes}}}
    (tmp_path / "shout").mkdir()
    (tmp_path / "shout/function.yaml").write_text(yaml.safe_dump({"spec": function}))
    (tmp_path / "shout/shout.py").write_text("def handler(context, event):\n    return event.body.decode().upper()\n")
    push = {"topics": [inputs], "group": f"{inputs}-p", "backend": {"url": backend.url}}
    settings = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
        "http": {"port": port},
        "reactive_consumers": {"push": push},
        "functions": ["shout/function.yaml"],
    }
    (tmp_path / "headrace.yaml").write_text(yaml.safe_dump(settings))
    assert "headrace.yaml: ok" in output(core / "headrace", "config", "check", cwd=tmp_path)
    with subprocess.Popen([core / "headrace", "run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert next(line for line in process.stdout if line.startswith("ready http="))
            body, kind = b'{"records": [{"value": "one"}]}', {"Content-Type": "application/json"}
            request = Request(f"http://127.0.0.1:{port}/producers/{inputs}", body, kind)
            with urlopen(request, timeout=30) as response:
                assert response.status == 200
            shown = output(core / "headrace", "consume", outputs, "--max", "1", "--follow", cwd=tmp_path)
            assert shown == '"ONE"\n'
            backend.wait_for(lambda found: len(found.accepted) == 1)
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


@pytest.mark.long
def test_the_core_alone_names_the_package_that_is_missing(core: Path, tmp_path: Path) -> None:
    """For each section, command and option of a guest, and for a folder of another product."""
    for words, text, sentence in CASES["missing"]:
        (tmp_path / "headrace.yaml").write_text(text)
        done = subprocess.run([core / "headrace", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode in (1, 78), sentence in done.stderr) == (True, True), (words, text, done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("extra", CASES["imports"])
def test_each_extra_installs(extra: str, core: Path, wheels: Mapping[str, Path], tmp_path: Path) -> None:
    """A copy of the core's environment takes it, without conflicts, and has what it is for."""
    shutil.copytree(core.parent, tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    needed = f"headrace[{extra}] @ {wheels['headrace'].as_uri()}"
    output(python, "-m", "pip", "install", "--quiet", "--find-links", wheels["headrace"].parent, needed)
    assert output(python, "-m", "pip", "check") == "No broken requirements found.\n"
    output(python, "-c", f"import {CASES['imports'][extra]}", cwd=tmp_path)


@pytest.mark.long
def test_all_packages_work_together(wheels: Mapping[str, Path], tmp_path: Path) -> None:
    """What is installed here is taken from here; the packages are the wheels. Every command and section is there."""
    python = tmp_path / "env/bin/python"
    output(sys.executable, "-m", "venv", tmp_path / "env")
    output(python, "-m", "pip", "install", "--quiet", "--no-deps", *wheels.values())
    here = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (there,) = (tmp_path / "env/lib").glob("python*/site-packages")
    for path in here.iterdir():
        if not re.search(r"headrace|^pip|^setuptools", path.name) and not (there / path.name).exists():
            (there / path.name).symlink_to(path)
    assert "headrace" in output(python, "-c", "import headrace; print(headrace.__file__)", cwd=tmp_path)
    helped = output(tmp_path / "env/bin/headrace", "--help", cwd=tmp_path)
    assert [name for name in CASES["commands"] if f"\n  {name} " not in helped] == []
    schema = output(tmp_path / "env/bin/headrace", "config", "schema", cwd=tmp_path)
    assert [name for name in CASES["sections"] if f'"{name}"' not in schema] == []
    for module in CASES["imports"].values():
        output(python, "-c", f"import {module}", cwd=tmp_path)
