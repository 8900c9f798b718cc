"""Fetches pinned artifacts once per user, and hands out nothing that was not verified by size and SHA-256.

The client is jgo, as a library and without dependency resolution. It writes straight to the final path and only
warns on a wrong checksum; so it works in a staging folder, and each file there is checked before it is used.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tarfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import EnvironmentProblem
from headrace.extras import not_installed
from headrace.runtime.cache import cache_folder
from headrace_jvm.disk import disk_problems, file_lock


class Artifact(NamedTuple):
    """One file of a Maven repository, pinned."""

    coordinate: str
    """`group:name:version[:packaging[:classifier]]`."""
    size: int
    sha256: str

    @property
    def parts(self) -> tuple[str, str, str, str, str]:
        """Group, name, version, packaging and classifier."""
        group, name, version, packaging, classifier, *_ = [*self.coordinate.split(":"), "", ""]
        return group, name, version, packaging or "jar", classifier

    @property
    def filename(self) -> str:
        """Name of the file as the repository has it."""
        _, name, version, packaging, classifier = self.parts
        return f"{name}-{version}{f'-{classifier}' if classifier else ''}.{packaging}"

    def fits(self, path: Path) -> bool:
        """Whether a file is this artifact."""
        return path.is_file() and path.stat().st_size == self.size and sha256_of(path) == self.sha256


class Lock(NamedTuple):
    """A set of artifacts."""

    title: str
    """Name and version of what the set is, as in its cache folder."""
    artifacts: tuple[Artifact, ...]
    digest: str
    """Short hash of the lock file; another digest is another cache folder."""


def lock_path(name: str) -> Path:
    """Return the lock file of a set."""
    return Path(__file__).with_name(f"{name}.lock")


def read_lock(name: str) -> Lock:
    """Read the lock file of a set."""
    text = lock_path(name).read_text(encoding="utf-8")
    document = tomllib.loads(text)
    pins = document["artifacts"].items()
    artifacts = tuple(Artifact(coordinate, pin.get("size", 0), pin.get("sha256", "")) for coordinate, pin in pins)
    return Lock(document["title"], artifacts, hashlib.sha256(text.encode()).hexdigest()[:12])


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Progress = Callable[[str, int, int], None]
"""Gets the present step, how much of it is done, and how much it is in all (bytes, or 0 and 0 if unknown)."""

_REPOSITORY_VARIABLE = "HEADRACE_MAVEN_REPOSITORY"
_DOWNLOADS = 6
"""Files at a time: most are small, so a line mostly waits for the repository."""
_DISK_ADVICE = "up to 700 MB are needed; or set XDG_CACHE_HOME to a folder with space"


def ensure_artifacts(name: str, progress: Progress | None = None) -> Path:
    """Return the folder that holds every artifact of a set such as `kafka` or `spark`, fetching what is missing.

    Jars lie in it under their repository names; `.tar.gz` archives are unpacked into it.

    Raises:
        EnvironmentProblem: The repository does not answer or lacks a file, a checksum differs, the disk is full, or jgo
            is missing. The text has the next step.
    """
    lock = read_lock(name)
    folder = cache_folder() / f"{lock.title}-{lock.digest}"
    if not _intact(folder, lock):
        with disk_problems(folder.parent, _DISK_ADVICE), file_lock(cache_folder() / f"{name}.lock"):
            if not _intact(folder, lock):
                shutil.rmtree(folder, ignore_errors=True)
                _install(lock, folder, progress or (lambda what, done, total: None))
    return folder


class Repository:
    """The Maven repository of this user, with a local folder for what comes from it."""

    def __init__(self, staging: Path, on_bytes: Callable[[int], None]) -> None:
        """Fetch into `staging`, calling `on_bytes` with the number of bytes of each part that arrives.

        Raises:
            EnvironmentProblem: jgo is not installed.
        """
        try:
            from jgo.config import GlobalSettings
            from jgo.maven import MavenContext, PythonResolver
        except ImportError as cause:
            raise not_installed("fetching jars", cause.name or "jgo", "devkit") from cause

        @contextlib.contextmanager
        def progress(filename: str, size: int) -> Iterator[Callable[[int], None]]:
            yield on_bytes

        mirror = os.environ.get(_REPOSITORY_VARIABLE)
        repositories = {"mirror": mirror.rstrip("/")} if mirror else GlobalSettings.load().repositories or None
        self._context: Any = MavenContext(
            PythonResolver(progress_callback=progress), staging, local_repos=[], remote_repos=repositories, timeout=30
        )

    def fetch(self, artifact: Artifact) -> Path:
        """Return the artifact's file in the staging folder, downloading it if it is not there; not yet verified.

        Raises:
            EnvironmentProblem: It cannot be had.
        """
        group, name, version, packaging, classifier = artifact.parts
        component = self._context.project(group, name).at_version(version)
        try:
            path: Path = component.artifact(classifier, packaging).resolve()
        except RuntimeError as cause:
            raise self._problem(artifact, "the repository does not have it") from cause
        except OSError as cause:  # the HTTP client's errors are OSErrors too
            if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._problem(artifact, f"no complete response ({type(cause).__name__})") from cause
        return path

    def _problem(self, artifact: Artifact, reason: str) -> EnvironmentProblem:
        # A mirror's address may hold a password before the "@".
        urls = ", ".join(re.sub(r"//[^/@]*@", "//", url) for url in self._context.remote_repos.values())
        return EnvironmentProblem(
            f"Could not download {artifact.coordinate} from {urls}: {reason}. Check the network, or name a Maven"
            f" repository you can reach in the environment variable {_REPOSITORY_VARIABLE}; then run the same command"
            " again, it continues where it stopped."
        )


def _intact(folder: Path, lock: Lock) -> bool:
    # The folder appears at once and complete. Jars are verified at every use (30 ms for Kafka's 45 MB); an archive's
    # files are not in the lock, so there the folder's presence counts.
    jars = [artifact for artifact in lock.artifacts if artifact.filename.endswith(".jar")]
    return folder.is_dir() and all(artifact.fits(folder / artifact.filename) for artifact in jars)


def _install(lock: Lock, folder: Path, progress: Progress) -> None:
    # The draft keeps what was verified before an interruption, the staging folder nothing.
    draft, staging = (folder.with_name(f"{folder.name}.{what}") for what in ("draft", "staging"))
    draft.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    total, done = sum(artifact.size for artifact in lock.artifacts), 0
    of_progress, interrupted = threading.Lock(), False

    def on_bytes(count: int) -> None:
        nonlocal done
        with of_progress:
            if interrupted:
                raise EnvironmentProblem("interrupted")
            done += count
            progress(f"downloading {lock.title}", done, total)

    repository = Repository(staging, on_bytes)

    def fetch(artifact: Artifact) -> None:
        if artifact.fits(draft / artifact.filename):
            on_bytes(artifact.size)
        else:
            _verified(repository.fetch(artifact), artifact).replace(draft / artifact.filename)

    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        try:
            list(pool.map(fetch, lock.artifacts))
        except KeyboardInterrupt:  # after an error the others are completed, so that they are not fetched again
            interrupted = True
            raise
    progress(f"downloading {lock.title}", total, total)
    for path in draft.glob("*.tar.gz"):
        progress(f"unpacking {lock.title}", 0, 0)
        with tarfile.open(path) as archive:
            archive.extractall(draft, filter="data")
        path.unlink()
    draft.rename(folder)
    shutil.rmtree(staging, ignore_errors=True)


def _verified(path: Path, artifact: Artifact) -> Path:
    if artifact.fits(path):
        return path
    received = path.stat().st_size
    path.unlink()
    raise EnvironmentProblem(
        f"The download of {artifact.coordinate} is not the file Headrace was tested with: {received:,} bytes,"
        f" {artifact.size:,} bytes with another SHA-256 were expected. It was deleted and nothing uses it. The"
        " transfer was cut short, or the repository or something on the way altered it. Run the same command again;"
        f" if it happens again, name another repository in {_REPOSITORY_VARIABLE}."
    )
