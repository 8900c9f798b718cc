"""References inside text values (`${env:NAME}`, `${file:/path}`, `${NAME:default}`), and which values are secrets.

Source: `${NAME:default}` is the placeholder of light-4j files; the colon after the name starts the default.
"""

import contextlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace.config.yaml_tree import KeyPath

_REFERENCE = re.compile(r"\$\$\{|\$\{((?:[^{}]|\{[^{}]*\})*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_FILE_BYTES = 65_536
_PRIVATE_KEY = "PRIVATE KEY-----"


class ReferenceProblem(Exception):
    """A reference has no value; the text has the reason, and never the value."""


def resolve(text: str, environ: Mapping[str, str], folder: Path, on_file: Callable[[Path], None]) -> str:
    """Return the text with every reference replaced; `$${` becomes a plain `${`.

    Relative paths in `${file:}` start from `folder`, and `on_file` is called with each file before it is read.

    Raises:
        ReferenceProblem: A variable is not set, a file cannot be read, or a reference is not well formed.
    """

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        kind, _, rest = (match[1] or "").partition(":")
        if kind == "file":
            path = folder / rest
            on_file(path)
            return _read(path)
        if kind == "env":
            return _variable(rest, environ)
        return _variable(match[1] or "", environ)

    return _REFERENCE.sub(replace, text)


class ReferredSecret(SecretStr):
    """A secret that is reloaded from its file at each use; if that fails, the last value stays."""

    def __init__(self, value: SecretStr, text: str, folder: Path) -> None:
        """Take the present value, and the text with references, whose relative paths start from `folder`."""
        super().__init__(value.get_secret_value())
        self._text, self._folder = text, folder

    def get_secret_value(self) -> str:
        with contextlib.suppress(ReferenceProblem):
            return resolve(self._text, os.environ, self._folder, lambda _: None)
        return super().get_secret_value()


def files_in(text: str) -> list[str]:
    """Return the names of the files that a text refers to."""
    return [
        match[1].removeprefix("file:") for match in _REFERENCE.finditer(text) if (match[1] or "").startswith("file:")
    ]


def is_file(path: Path) -> bool:
    """Return whether a path names a file. A text that is too long for a path does not, and no error shows it."""
    try:
        return path.is_file()
    except OSError:
        return False


class FileChanges:
    """Whether files have changed since the last check. Links are followed, as secret mounts need it."""

    LOOK_SECONDS = 10.0
    """How often to check."""

    def __init__(self, files: Iterable[Path | None]) -> None:
        """Take the present state of the files; None is ignored."""
        self._files = [path for path in files if path]
        self._seen = [_stamp(path) for path in self._files]

    def found(self) -> bool:
        """Return whether a file was written, replaced, removed or created again since the last call."""
        before, self._seen = self._seen, [_stamp(path) for path in self._files]
        return self._seen != before


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def holds_plain_text(text: str) -> bool:
    """Return whether the file itself has the secret: the text is not a reference, or is one with a default."""
    references = [match[1] for match in _REFERENCE.finditer(text) if match[1]]
    if not references:
        return bool(text)
    return any(
        not reference.startswith("file:") and reference.removeprefix("env:").partition(":")[2]
        for reference in references
    )


def _variable(reference: str, environ: Mapping[str, str]) -> str:
    name, has_default, default = reference.partition(":")
    if not _NAME.fullmatch(name):
        raise ReferenceProblem(
            "has a malformed reference: write ${env:NAME}, ${file:/path} or ${NAME:default}, and $${ for a plain ${"
        )
    if has_default:
        return environ.get(name) or default
    if name not in environ:
        raise ReferenceProblem(f"refers to the environment variable {name}, which is not set: set it")
    return environ[name]


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            raise ReferenceProblem(f"file not found, or not a plain file: {path}")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ReferenceProblem(f"refers to the file {path}, which is larger than {_MAX_FILE_BYTES} bytes")
        return content.decode().rstrip("\r\n")
    except OSError as cause:
        raise ReferenceProblem(f"refers to the file {path}, which cannot be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise ReferenceProblem(f"refers to the file {path}, which is not UTF-8 text") from cause


log = logging.getLogger(__name__)

_SECRET_NAME = re.compile(
    r"(password|passphrase|secret|token|(api|access|auth|subscription|functions)[-_.]?key|x-auth|key\.pem|"
    r"jaas\.config|oauthbearer\.config|authorization|cookie)$",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Return whether a key of this name holds a secret: `sasl.password`, but not `ssl.key.location`."""
    return _SECRET_NAME.search(name) is not None


_REFERENCES = "write ${env:NAME} or ${file:/path} instead of the secret"


def too_open(path: Path, *, mounted: bool, instead: str = _REFERENCES) -> str:
    """Return why a file must not hold a secret; empty if it may.

    A `mounted` file holds nothing but the secret (`${file:}`). Secret mounts often cannot have strict modes, so one
    that belongs to root or to a group of this user only causes a warning. `instead` is what else to do.
    """
    found = path.stat()
    others, group = found.st_mode & stat.S_IROTH, found.st_mode & stat.S_IRGRP
    our_group = found.st_gid in {os.getegid(), *os.getgroups()}
    foreign = found.st_uid not in (0, os.geteuid())
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    if mounted and (others or group or foreign) and (found.st_uid == 0 or our_group):
        log.warning("%s holds a secret and its mode is %s: others on this machine may read it", path, mode)
        return ""
    if foreign:
        why = f"{path} holds a secret and belongs to another user"
        return f"{why}: change its owner to the user who runs Headrace, or {instead}"
    if others or (group and not our_group):
        return (
            f"{path} holds a secret in plain text and its mode is {mode}, so others can read it: chmod 600 {path}, "
            f"or {instead}"
        )
    if group:
        log.warning("%s holds a secret and its group may read it (mode %s)", path, mode)
    return ""


class FileReferences:
    """Replaces the references of one file, and reports those without a value and secrets that other users can read."""

    def __init__(
        self, file: Path | None, folder: Path, environ: Mapping[str, str], report: Callable[[KeyPath, str], None]
    ) -> None:
        self._file = file
        self.folder = folder
        """The folder that relative paths start from."""
        self._environ = environ
        self.report = report
        """Takes the path and the sentence of a problem."""
        self.texts: dict[KeyPath, str] = {}
        """Paths of replaced references, with their text."""
        self.unresolved: set[KeyPath] = set()
        """Paths of references without a value."""
        self._is_open = False
        """Whether a secret in the file itself that others can read is already reported."""

    def replaced(self, value: Any, at: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self.replaced(item, (*at, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.replaced(item, (*at, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        files: list[Path] = []
        try:
            found = resolve(value, self._environ, self.folder, files.append)
        except ReferenceProblem as cause:
            self.unresolved.add(at)
            self.report(at, str(cause))
            return value
        secret = is_secret_name(next(part for part in reversed(at) if isinstance(part, str)))
        if (secret and holds_plain_text(value)) or _PRIVATE_KEY in value:
            self._check_file(at)
        if secret or _PRIVATE_KEY in found:
            for file in files:
                self.check_mount(file, at)
        if found != value:
            self.texts[at] = value
        return found

    def name_of(self, at: KeyPath) -> str:
        """Return the reference of a value and a blank, for errors; empty if the text may hold a secret."""
        text = self.texts.get(at, "")
        return f"{text} " if _REFERENCE.fullmatch(text) and not holds_plain_text(text) else ""

    def check_mount(self, file: Path | None, at: KeyPath) -> None:
        """Report a file that holds a secret and that others can read."""
        if file and is_file(file) and (reason := too_open(file, mounted=True)):
            self.report(at, reason)

    def below(self, at: KeyPath) -> dict[KeyPath, str]:
        """Return the texts with references to files of one section, by their path in it."""
        return {path[len(at) :]: text for path, text in self.texts.items() if path[: len(at)] == at and files_in(text)}

    def _check_file(self, at: KeyPath) -> None:
        if self._file and not self._is_open and (reason := too_open(self._file, mounted=False)):
            self._is_open = True
            self.report(at, reason)
