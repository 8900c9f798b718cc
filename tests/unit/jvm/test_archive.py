"""Class-data archives: one for each installation, of its present content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace_jvm import ClassArchive, Java


@pytest.fixture
def java(tmp_path: Path) -> Java:
    own = tmp_path / "java" / "lib" / "server" / "classes.jsa"
    own.parent.mkdir(parents=True)
    own.touch()
    return Java(tmp_path / "java", tmp_path / "java" / "bin" / "java", 17, "Java 17")


def make(archive: ClassArchive, content: str) -> None:
    def exercise(flags: Sequence[str], scratch: Path) -> None:
        [written] = [flag.partition("=")[2] for flag in flags if flag.startswith("-XX:ArchiveClassesAtExit=")]
        Path(written).write_text(content)
        Path(written).chmod(0o444)  # as the JVM does

    archive.make(exercise, None)


def archives(folder: Path) -> list[str]:
    return sorted(file.read_text() for file in folder.glob("*.jsa"))


def test_another_installation_in_a_folder_replaces_its_archive_alone(tmp_path: Path, java: Java) -> None:
    """A running JVM keeps what it has mapped, and the archive of another folder stays."""
    jars, other, cache = (tmp_path / name for name in ("jars", "other", "cache"))
    for folder in (jars, other, cache):
        folder.mkdir()
    one, two = ClassArchive(java, cache, jars), ClassArchive(java, cache, other)
    assert one.flags == ()
    make(one, "first")
    make(two, "other")
    make(one, "not made again")
    assert archives(cache) == ["first", "other"]
    [flag] = one.flags
    with Path(flag.partition("=")[2]).open() as mapped:
        os.utime(jars, (1_800_000_000, 1_800_000_000))
        assert one.flags == ()
        assert two.flags
        make(one, "second")
        assert mapped.read() == "first"
    assert archives(cache) == ["other", "second"]
    assert one.flags == (flag,)
