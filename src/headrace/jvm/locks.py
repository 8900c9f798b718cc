"""Lock files: which artifacts make a set, with the size and SHA-256 of each.

A lock is a TOML table, one line per artifact: `"group:artifact:version[:packaging[:classifier]]" = {size, sha256}`.
To change a set, edit its coordinates (`mvn dependency:list` prints the closure of a dependency; an empty `{}` will
do for a new line) and run `python -m headrace.jvm.relock NAME`, which fetches them and fills in size and SHA-256.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Artifact:
    """One file of a Maven repository, pinned."""

    group: str
    name: str
    version: str
    packaging: str
    classifier: str
    size: int
    sha256: str

    @property
    def coordinate(self) -> str:
        """`group:name:version[:packaging[:classifier]]`."""
        optional = [self.packaging, self.classifier] if self.classifier else [self.packaging]
        return ":".join([self.group, self.name, self.version, *([] if optional == ["jar"] else optional)])

    @property
    def filename(self) -> str:
        """Name of the file as the repository has it."""
        return f"{self.name}-{self.version}{f'-{self.classifier}' if self.classifier else ''}.{self.packaging}"


@dataclass(frozen=True)
class Lock:
    """A set of artifacts."""

    title: str
    """Name and version of what the set is, as in its cache folder."""
    artifacts: tuple[Artifact, ...]
    digest: str
    """Short hash of the lock file; another digest is another cache folder."""

    @property
    def size(self) -> int:
        """Bytes of all artifacts together."""
        return sum(artifact.size for artifact in self.artifacts)


def lock_path(name: str) -> Path:
    """Return the lock file of a set."""
    return Path(__file__).with_name(f"{name}.lock")


def read_lock(name: str) -> Lock:
    """Read the lock file of a set."""
    text = lock_path(name).read_text(encoding="utf-8")
    document = tomllib.loads(text)
    artifacts = tuple(_artifact(coordinate, pin) for coordinate, pin in document["artifacts"].items())
    return Lock(document["title"], artifacts, hashlib.sha256(text.encode()).hexdigest()[:12])


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _artifact(coordinate: str, pin: dict[str, str | int]) -> Artifact:
    group, name, version, packaging, classifier, *_ = [*coordinate.split(":"), "", ""]
    return Artifact(
        group, name, version, packaging or "jar", classifier, int(pin.get("size", 0)), str(pin.get("sha256", ""))
    )
