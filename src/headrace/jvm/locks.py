"""Lock files: which artifacts make a set, with the size and SHA-256 of each.

A lock is a TOML table, one line per artifact: `"group:artifact:version[:packaging[:classifier]]" = {size, sha256}`.
To change a set, edit its coordinates (`mvn dependency:list` prints the closure of a dependency; an empty `{}` will
do for a new line) and run `python tools/relock.py NAME`, which fetches them and fills in size and SHA-256.
"""

import hashlib
import tomllib
from pathlib import Path
from typing import NamedTuple


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
