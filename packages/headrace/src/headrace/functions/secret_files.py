"""Where the secrets of a function file are on this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.config.references import is_file


class SecretFiles(NamedTuple):
    """Where the secrets of a function file are on this machine."""

    file: Path
    """The function file; relative paths start from its folder."""
    mounts: Mapping[Path, str]
    """Each `mountPath` of `spec.volumes`, and the `secretName` there."""
    folder: Path | None
    """Holds a folder per secret; None if there is none."""

    def find(self, path: Path) -> Path:
        """Return where a file is.

        Raises:
            ValueError: It is in a mounted secret, and no folder is set.
        """
        for mount, secret in self.mounts.items():
            if path.is_relative_to(mount) and self.folder:
                return self.folder / secret / path.relative_to(mount)
            if path.is_relative_to(mount) and not is_file(path):
                raise ValueError(
                    f"is in the secret {secret}, which spec.volumes mounts: set functions_secrets_dir in headrace.yaml "
                    f"to the folder in which {secret} is a folder with a file per key"
                )
        return path
