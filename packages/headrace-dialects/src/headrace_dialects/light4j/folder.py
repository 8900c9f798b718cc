"""Finds the files of a light-4j folder, and returns every value with its location.

A file of the folder replaces the packaged one. Without it, placeholders of the packaged file still have their values.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.config.references import is_secret_name
from headrace.config.spelling import hint, nearest
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import ConfigError
from headrace_dialects.light4j.key_table import FILES, OTHER_NAMES, LightKey, keys_of, row_of, rows_of
from headrace_dialects.light4j.placeholders import PlaceholderProblem, Placeholders, Setting, refuse_encrypted, typed

_ENDINGS: Final = (".yml", ".yaml", ".json")
_NEVER_REPLACED: Final = ("openapi", "values", "status", "config", "app-status")
_LOGIN: Final = "login"
_PASSWORD: Final = "KAFKA_{}_PASSWORD"
_CLIENTS: Final = ("PRODUCER", "CONSUMER", "ADMIN", "STREAMS", "KSQLDB")


def folders_of(path: Path) -> list[Path]:
    """Return the folders that a path names, separated as in a search path; empty if it is not made of folders."""
    parts = str(path).split(os.pathsep)
    return [Path(part) for part in parts] if all(part and Path(part).is_dir() for part in parts) else []


class LightFolder:
    """The values of a folder by file and key, the problems in it, and the keys without effect."""

    def __init__(self, folders: Sequence[Path], environ: Mapping[str, str], problems: Problems) -> None:
        """Read the folders; a file of the first one wins.

        Raises:
            ConfigError: A file cannot be read, or there is none of light-4j's.
        """
        self.folders, self.environ, self.problems = folders, environ, problems
        self.settings: dict[str, dict[str, Setting]] = {file: {} for file in FILES}
        """By file and key."""
        self.remarks: dict[tuple[str, str], list[str]] = {}
        """Keys without effect, by file and reason."""
        try:
            self._files = {path.stem: path for folder in reversed(folders) for path in _documents(folder)}
        except OSError as cause:
            raise ConfigError(f"{cause.filename}: cannot be read: {cause.strerror}. Correct its mode") from cause
        if not set(FILES).intersection(self._files):
            raise ConfigError(f"{folders[0]}: no file of light-4j's sidecar such as values.yml: name another folder")
        self._values = {
            str(path[0]): value._replace(secret=value.location if is_secret_name(str(path[0])) else "")
            for path, value in self._tree("values", deep=False)
        }
        for client in _CLIENTS:  # older files have this name
            if password := self._values.get(f"kafka-{client.lower()}.password"):
                self._values.setdefault(_PASSWORD.format(client), password)
        config = {str(path[-1]): value.value for path, value in self._tree("config")}
        excluded = config.get("exclusionConfigFileList", ())
        self._excluded = {*_NEVER_REPLACED, *(excluded if isinstance(excluded, list) else ())}
        allow_empty = config.get("allowDefaultValueEmpty", "config" not in self._files) is True
        try:
            self._placeholders = Placeholders(self._values, environ, allow_empty=allow_empty)
        except PlaceholderProblem as cause:
            problems.add("injection_order", (), str(cause))
            self._placeholders = Placeholders(self._values, {}, allow_empty=allow_empty)
        self._check_names()
        for file in FILES:
            if file != "values":
                keys = self._own(file) if file in self._files else self._packaged(file)
                self.settings[OTHER_NAMES.get(file, file)] |= keys
        self._check_values()

    def get(self, file: str, key: str) -> Setting:
        """Return a key; if the folder does not have it, one without a value, or the row's if Headrace applies it."""
        return self.settings[file].get(
            key, Setting(None, f"{self.folders[0] / file}.yml:default", key, written=False, packaged=True)
        )

    def remark(self, found: Setting, why: str) -> None:
        """Add a key that has no effect, if the user wrote it."""
        file, _, line = found.location.rpartition(":")
        label, named = (file, f"{found.key} ({line})") if found.key else ("environment", found.location)
        keys = self.remarks.setdefault((label, why), []) if found.written else [named]
        keys += [named] if named not in keys else []

    def refuse(self, found: Setting, sentence: str) -> None:
        """Add a problem of a key."""
        self.problems.add(found.label, (), sentence)

    def has_file(self, file: str) -> bool:
        """Return whether the folder has a file of this name."""
        return file in self._files

    def path_of(self, name: str) -> Path:
        """Return the path of a file that a value names: in a folder, which containers mount as `/config`."""
        inside = name.removeprefix("/config/")
        folders = [Path(), *self.folders] if Path(name).is_absolute() else [*self.folders, Path()]
        paths = [folder / (name if folder == Path() else inside) for folder in folders]
        return next((path for path in paths if path.is_file()), self.folders[0] / inside).absolute()

    def _tree(self, file: str, *, deep: bool = True) -> Iterator[tuple[tuple[str, ...], Setting]]:
        """Yield the values of a file with their paths; only those at the top unless `deep`."""
        if not (path := self._files.get(file)):
            return
        inside = Problems()
        tree = read_tree(read_text(path, ConfigError, "Correct its mode"), str(path), inside)
        self.problems.found += inside.found
        if not isinstance(tree, dict):
            self.problems.add(f"{path}:1", (), "is not a map of keys: write lines such as `topic: orders`")
            return
        for keys, value in _leaves(tree) if deep else (((key,), value) for key, value in tree.items()):
            yield keys, Setting(value, inside.location_of(keys), ".".join(keys))

    def _check_names(self) -> None:
        """Report files whose names are not known."""
        for file, path in self._files.items():
            found = Setting(None, f"{path}:1", "the file")
            if file == "headrace":
                self.refuse(found, "is Headrace's own: name it instead of the folder, or move it")
            elif file not in FILES and (near := nearest(file, FILES, 0.85)):
                self.refuse(found, f"is not a file of light-4j's sidecar: did you mean {near}.yml?")
            elif file not in FILES:
                self.remark(found, "light-4j's sidecar does not read it")

    def _own(self, file: str) -> dict[str, Setting]:
        """Return the keys of a file of the folder, and the defaults of those that every version needs."""
        found: dict[str, Setting] = {}
        for keys, value in self._tree(file):
            if replaced := value if file in self._excluded else self._replaced(value):
                for further, item in _leaves(replaced.value):
                    key = ".".join((*keys, *further))
                    row = row_of(file, key)
                    written = replaced.written or not row or item != typed(row.default)
                    if item is not None and (written or (row and row.applied)):
                        found[key] = replaced._replace(value=item, written=written)
        for row in rows_of(file):
            if row.applied == "yes" and not row.key.startswith("properties."):
                found.setdefault(row.key, self._default(row))
        return found

    def _replaced(self, setting: Setting) -> Setting | None:
        try:
            return self._placeholders.replaced(setting)
        except PlaceholderProblem as cause:
            self.refuse(setting, str(cause))
            return None

    def _default(self, row: LightKey, value: object = None) -> Setting:
        location = f"{self.folders[0] / row.file}.yml:default"
        return Setting(typed(row.default) if value is None else value, location, row.key, written=False, packaged=True)

    def _packaged(self, file: str) -> dict[str, Setting]:
        """Return the keys of the packaged file: what the user sets, and the defaults that Headrace applies."""
        found: dict[str, Setting] = {}
        client = file.removeprefix("kafka-").upper()
        names = {row: f"{file}.{row.key.removeprefix('properties.')}" for row in rows_of(file) if row.key != "*"}
        parts = [f"{file}.username", _PASSWORD.format(client), *(names[row] for row in names if row.applied == _LOGIN)]
        has_login, is_broken = any(self._placeholders.given(part) for part in parts), False
        for row, name in names.items():
            if row.applied == _LOGIN and not has_login:
                continue
            is_text = "${" in row.default and not self._placeholders.given(name)
            text = row.default if is_text else f"${{{name}:{row.default if '${' not in row.default else ''}}}"
            try:
                setting = self._placeholders.replaced(self._default(row, text))
            except PlaceholderProblem as cause:
                if row.applied == _LOGIN and row.key.endswith("jaas.config") and "SASL" in _protocol(found):
                    self.refuse(self._default(row), str(cause))
                    is_broken = True
                continue
            family = row.key.removeprefix("properties.")[:4].rstrip(".").upper()
            unused = not setting.written and family in ("SASL", "SSL") and family not in _protocol(found)
            if setting.written or (row.applied and not unused and file not in OTHER_NAMES):
                found[row.key] = setting
        return {key: value for key, value in found.items() if not is_broken or not key.startswith("properties.s")}

    def _check_values(self) -> None:
        """Keep the keys of `values.yml` that no placeholder names, so that each is refused or listed."""
        passwords = {
            name for client in _CLIENTS for name in (_PASSWORD.format(client), f"kafka-{client.lower()}.password")
        }
        known = passwords | self._placeholders.used
        for key, found in self._values.items():
            file = max((name for name in FILES if key.startswith(f"{name}.")), key=len, default="")
            name = key[len(file) + 1 :]
            try:
                refuse_encrypted(str(found.value), key)
            except PlaceholderProblem as cause:
                self.refuse(found, str(cause))
                continue
            if key in known or key.endswith("ShutdownHookProvider"):
                continue
            if key in FILES:
                self.refuse(found, f"is a map, which no placeholder reads: write flat keys such as {key}.topic")
            elif not file and (near := nearest(key.partition(".")[0], FILES, 0.85)):
                self.refuse(found, f"belongs to no file of light-4j's sidecar: did you mean {near}?")
            elif not file:
                self.remark(found, "no file has a placeholder of this name")
            elif file in self._files:
                self.remark(found, f"{self._files[file].name} has no placeholder of this name")
            elif file.startswith("kafka-") and not row_of(file, name):
                names = [each.removeprefix("properties.") for each in keys_of(file)]
                self.refuse(found, f"unknown key: {hint(name, names)}")
            else:
                self.settings[OTHER_NAMES.get(file, file)].setdefault(name, found)


def _protocol(found: Mapping[str, Setting]) -> str:
    protocol = found.get("properties.security.protocol")
    return str(protocol.value).upper() if protocol else ""


def _documents(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that light-4j would read, the preferred ending of a name last."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _ENDINGS and path.is_file()]
    yield from sorted(files, key=lambda path: -_ENDINGS.index(path.suffix))


def _leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value below nested maps with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*at, str(key)))
    else:
        yield at, value
