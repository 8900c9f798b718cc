"""Where the secrets of a function file are on this machine."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.config.references import ReferenceProblem, is_file, resolve

KINDS_OF_FILES: Final[Mapping[str, str]] = {"secretKeyRef": "secret", "configMapKeyRef": "ConfigMap"}
"""What a variable may be read from: the key under `valueFrom`, and its name for people."""


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

    def key_of(self, secret: Any, key: Any, kind: str = "secret") -> str:
        """Return the text of a key of a secret, or of a ConfigMap if that is the `kind`.

        Raises:
            ValueError: The secret is missing, or is not a text of an acceptable size.
        """
        for name, value in {"name": secret, "key": key}.items():
            if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*", value):
                raise ValueError(f"has {name} {value}: write the name and key of a {kind}")
        if not self.folder:
            raise ValueError(
                f"names key {key} of the {kind} {secret}: set functions_secrets_dir in headrace.yaml to the folder in "
                f"which {secret} is a folder with a file per key"
            )
        try:
            return resolve(f"${{file:{secret}/{key}}}", {}, self.folder, lambda _: None)
        except ReferenceProblem as cause:
            raise ValueError(f"names key {key} of the {kind} {secret}, and {cause}") from None
