from __future__ import annotations

import errno
import hashlib
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from headrace.errors import EnvironmentProblem
from headrace_jvm import artifacts, ensure_artifacts
from headrace_jvm.artifacts import Artifact, Lock, lock_path, read_lock

GOOD = b"a jar, for all we know" * 1000


class Maven:
    """A Maven repository on loopback."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requested: list[str] = []
        maven = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                maven.requested.append(self.path)
                data = maven.files.get(self.path)
                self.send_response(200 if data is not None else 404)
                cut = data is not None and data.startswith(b"CUT")
                self.send_header("Content-Length", str(len(data or b"") + (100 if cut else 0)))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def downloads(self) -> list[str]:
        """Return the requested paths without those of checksums, in alphabetical order."""
        return sorted(path for path in self.requested if not path.endswith(".sha1"))


@pytest.fixture
def maven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Maven]:
    """A repository that the mirror variable names, and an empty cache."""
    maven = Maven()
    thread = threading.Thread(target=maven.server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HEADRACE_MAVEN_REPOSITORY", maven.url + "/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield maven
    maven.server.shutdown()
    thread.join()
    maven.server.server_close()


def _pin(monkeypatch: pytest.MonkeyPatch, *pinned: tuple[str, bytes], packaging: str = "") -> None:
    pins = [
        Artifact(f"org.example:{name}:1.0{packaging}", len(data), hashlib.sha256(data).hexdigest())
        for name, data in pinned
    ]
    monkeypatch.setattr(artifacts, "read_lock", lambda name: Lock("example-1.0", tuple(pins), "abc"))


def _path(name: str, packaging: str = "jar") -> str:
    return f"/org/example/{name}/1.0/{name}-1.0.{packaging}"


def _folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "headrace" / "example-1.0-abc"


def test_a_set_is_fetched_once_and_verified_at_each_use(monkeypatch: pytest.MonkeyPatch, maven: Maven) -> None:
    """A second call downloads only a jar that was changed since; progress ends at the whole size."""
    _pin(monkeypatch, ("one", GOOD), ("two", b"2"))
    maven.files = {_path("one"): GOOD, _path("two"): b"2"}
    progress: list[tuple[str, int, int]] = []
    folder = ensure_artifacts("example", lambda *what: progress.append(what))
    assert sorted(path.name for path in folder.iterdir()) == ["one-1.0.jar", "two-1.0.jar"]
    assert progress[-1] == ("downloading example-1.0", len(GOOD) + 1, len(GOOD) + 1)
    assert ensure_artifacts("example") == folder
    assert maven.downloads() == [_path("one"), _path("two")]
    jar = folder / "one-1.0.jar"
    jar.write_bytes(b"B" + GOOD[1:])
    ensure_artifacts("example")
    assert jar.read_bytes() == GOOD


def test_an_altered_download_is_refused_deleted_and_said(
    monkeypatch: pytest.MonkeyPatch, maven: Maven, tmp_path: Path
) -> None:
    """Same size, one byte different: nothing of it can be used; the next run, from a good repository, works."""
    _pin(monkeypatch, ("one", GOOD))
    maven.files = {_path("one"): b"A" + GOOD[1:]}
    with pytest.raises(EnvironmentProblem, match=r"org\.example:one:1\.0 is not the file .* HEADRACE_MAVEN_REPOSITORY"):
        ensure_artifacts("example")
    assert not _folder(tmp_path).exists()
    maven.files = {_path("one"): GOOD}
    assert (ensure_artifacts("example") / "one-1.0.jar").read_bytes() == GOOD


def test_a_truncated_download_is_refused_and_taken_up_again(
    monkeypatch: pytest.MonkeyPatch, maven: Maven, tmp_path: Path
) -> None:
    """A connection cut in the middle leaves nothing that counts; what was complete before is not fetched again."""
    _pin(monkeypatch, ("one", GOOD), ("two", GOOD))
    maven.files = {_path("one"): GOOD, _path("two"): b"CUT" + GOOD[3:90]}
    with pytest.raises(EnvironmentProblem, match=r"no complete response .* continues where it stopped"):
        ensure_artifacts("example")
    assert not _folder(tmp_path).exists()
    maven.files[_path("two")] = GOOD
    assert (ensure_artifacts("example") / "two-1.0.jar").read_bytes() == GOOD
    assert maven.downloads() == [_path("one"), _path("two"), _path("two")]


def test_a_full_disk_and_a_missing_client_have_their_remedy(monkeypatch: pytest.MonkeyPatch, maven: Maven) -> None:
    """The folder that needs space, and the command that installs jgo."""
    _pin(monkeypatch, ("one", GOOD))
    with monkeypatch.context() as patch:
        patch.setattr(artifacts.Repository, "fetch", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(EnvironmentProblem, match=r"cache/headrace: No space left on device\. .* XDG_CACHE_HOME"):
            ensure_artifacts("example")
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'headrace\[devkit\]'"):
        ensure_artifacts("example")


def test_an_archive_is_unpacked(monkeypatch: pytest.MonkeyPatch, maven: Maven) -> None:
    """A tar.gz becomes its files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("lib/app.jar")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"app"))
    _pin(monkeypatch, ("app", buffer.getvalue()), packaging=":tar.gz")
    maven.files = {_path("app", "tar.gz"): buffer.getvalue()}
    folder = ensure_artifacts("example")
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.*")] == ["lib/app.jar"]


@pytest.mark.parametrize(("name", "count"), [("kafka", 46), ("spark", 4), ("registry", 1)])
def test_every_shipped_lock_pins_every_artifact(name: str, count: int) -> None:
    """Size and SHA-256 are there for each, and no address."""
    lock = read_lock(name)
    assert len(lock.artifacts) == count
    assert all(len(artifact.sha256) == 64 and artifact.size > 0 for artifact in lock.artifacts)
    assert "://" not in lock_path(name).read_text()
