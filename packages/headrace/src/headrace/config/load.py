"""Reads `headrace.yaml` and the environment into the models. Every problem is reported with its line.

Order: defaults, file, environment. Only `config` interprets the file and its references.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.backend import BackendConfig
from headrace.config.dialects import dialect_of
from headrace.config.explain import AnySection, known_keys, refuse_constants, validated
from headrace.config.http import HttpConfig, JwtConfig
from headrace.config.kafka_java import PROPERTIES_ALONE, SECURITY_KEYS, parse_jaas, translated, write_back
from headrace.config.kafka_security import located
from headrace.config.model import HeadraceConfig
from headrace.config.references import FileReferences, ReferredSecret, is_file
from headrace.config.remote_server import RemoteServer
from headrace.config.section import Section
from headrace.config.whole_file import WholeFile
from headrace.config.yaml_tree import KeyPath, Problems, dotted, read_text, read_tree
from headrace.errors import ConfigError
from headrace.extras import SECTIONS_OF_GUESTS, guest_missing

_OVERRIDE_PREFIX = "HEADRACE__"
_FILE_LISTS = [name for name, field in WholeFile.model_fields.items() if field.annotation == list[Path]]
_PROPERTIES = ("kafka", "properties")


Check = Callable[[HeadraceConfig], Iterable[tuple[KeyPath, str]]]
"""Returns the path of each setting that is not valid, and what to do."""


class ConfigReading(NamedTuple):
    """The part of a configuration that could be read."""

    config: HeadraceConfig | None
    """None if a value is not valid."""
    problems: list[str]
    """One paragraph per problem, in the order of the file."""
    files: dict[str, list[Path]]
    """Existing files that it names, by the key of their list, such as `functions`."""
    tree: dict[str, Any]
    """What is set, as in a file: references, overrides and names of other clients are replaced."""
    remarks: list[str]
    """Keys of a light-4j folder that have no effect, and why."""


def load_config(
    path: Path | None, environ: Mapping[str, str], only: Collection[str] = (), check: Check | None = None
) -> HeadraceConfig:
    """Return the effective configuration; the arguments are those of `read_config`.

    With `only`, the other sections of the file keep their defaults, and problems in them are ignored.

    Raises:
        ConfigError: One paragraph per problem, all problems at once.
    """
    found = _FileReader(path, environ, only).read(check)
    if found.problems or not found.config:
        raise ConfigError("\n".join(found.problems))
    return found.config


def read_config(path: Path | None, environ: Mapping[str, str], check: Check | None = None) -> ConfigReading:
    """Read the configuration and find every problem in it.

    Args:
        path: The file, or folders of light-4j; None for defaults and environment alone.
        environ: The environment: for `${env:NAME}`, `${NAME:default}` and overrides such as
            `HEADRACE__HTTP__PORT=9000`. An override that starts with `[` or `{` is read as YAML. Any other value is
            converted to the type of its setting.
        check: Finds further problems of a configuration whose values are valid.

    Raises:
        ConfigError: The file cannot be read.
    """
    return _FileReader(path, environ).read(check)


class _FileReader:
    """Reads one file: its tree, the location of each key, and the problems found so far."""

    def __init__(self, path: Path | None, environ: Mapping[str, str], only: Collection[str] = ()) -> None:
        self._path = path
        self._environ = environ
        self._dialect = dialect_of(path)
        self._folder = path.resolve().parent if path and not self._dialect else Path.cwd()
        self._remarks: list[str] = []
        self._problems = Problems()
        self._problems.ignored = SECTIONS_OF_GUESTS.union(known_keys(())).difference(only) if only else frozenset()
        self._report, self._locations = self._problems.report, self._problems.locations
        name = str(path) if path else "environment"
        if path and self._dialect:
            self._tree, self._remarks = self._dialect.read(path, environ, self._problems)
        else:
            if path and path.is_dir() and (missing := guest_missing("folder light-4j", "reading folders of light-4j")):
                raise ConfigError(f"{path} is a folder: {missing.description}")
            text = read_text(path, ConfigError, "Name the file with -c") if path else ""
            self._tree = read_tree(text, name, self._problems)
        if not isinstance(self._tree, dict):
            self._problems.add(f"{name}:1", (), "is not a map of settings: write lines such as `http: {port: 8082}`")
            self._tree = {}
        self._tree = {name: value for name, value in self._tree.items() if name not in self._problems.ignored}
        self._references = FileReferences(None if self._dialect else path, self._folder, environ, self._report)

    def read(self, check: Check | None) -> ConfigReading:
        self._split_jaas()
        if not self._dialect:
            self._tree = self._references.replaced(self._tree, ())
        self._apply_overrides()
        refuse_constants(WholeFile, self._tree, self._problems)
        self._translate_properties()
        files = self._named_files()
        config = validated(WholeFile, self._tree, self._problems, self._references.unresolved)
        if config:
            config = self._with_absolute_paths(config)
            for path, sentence in (*unprotected(config), *(check(config) if check else ())):
                self._report(path, sentence)
        write_back(self._tree.get("kafka"))
        return ConfigReading(config, self._problems.ordered, files, self._tree, self._remarks)

    def _kafka_properties(self) -> dict[str, Any]:
        kafka = self._tree.get("kafka")
        properties = kafka.get("properties") if isinstance(kafka, dict) else None
        return properties if isinstance(properties, dict) else {}

    def _split_jaas(self) -> None:
        """Parse a JAAS line before its references are replaced: their values are not part of its syntax."""
        properties, name = self._kafka_properties(), "sasl.jaas.config"
        if isinstance(line := properties.get(name), str) and "LoginModule" in line:
            try:
                properties[name] = parse_jaas(line)
            except ValueError as cause:
                self._report((*_PROPERTIES, name), str(cause))
                self._references.unresolved.add((*_PROPERTIES, name))

    def _translate_properties(self) -> None:
        """Move the security properties of every client to `kafka.security`, with their lines and references."""
        properties = self._kafka_properties()
        found = {name: properties.pop(name) for name in [*properties] if name in SECURITY_KEYS}
        wrong = any(path[:2] == _PROPERTIES for path in self._references.unresolved)
        settings: dict[KeyPath, tuple[KeyPath, Any]] = {}
        for name in () if wrong else found:
            try:
                if "security" in self._tree["kafka"] and name not in PROPERTIES_ALONE:
                    raise ValueError(f"has no effect with kafka.security: set {SECURITY_KEYS[name]} there instead")
                for source, path, value in translated(name, found):
                    if other := settings.get(path):
                        raise ValueError(f"sets kafka.security.{dotted(path)}, as {other[0][0]} does: remove one")
                    if _has_path(self._tree["kafka"].get("security"), path):
                        raise ValueError(f"sets kafka.security.{dotted(path)}, which is set there: remove one")
                    settings[path] = source, value
            except ValueError as cause:
                wrong = True
                self._report((*_PROPERTIES, name), str(cause))
        for path, (source, value) in () if wrong else settings.items():
            if _is_blocked(self._tree["kafka"], ("security", *path[:-1])):
                continue  # the section is not a map, which its check reports
            self._move(source, path, value, found[str(source[0])])

    def _move(self, source: KeyPath, path: KeyPath, value: Any, written: Any) -> None:
        """Write a setting into the section `kafka.security`, with the line and reference of its property."""
        old, new = (*_PROPERTIES, *source), ("kafka", "security", *path)
        node, line = self._tree["kafka"], self._problems.location_of(old)
        for at, part in enumerate(new[1:-1], 2):
            node = node.setdefault(part, {})
            self._locations.setdefault(new[:at], line)
        node[new[-1]], self._locations[new] = value, line
        if value is written or isinstance(written, dict):  # otherwise the reference is for another value
            texts = self._references.texts
            texts |= {(*new, *known[len(old) :]): text for known, text in texts.items() if known[: len(old)] == old}

    def _apply_overrides(self) -> None:
        """Write the overrides of the environment into the tree, also those with unknown names."""
        locations = self._locations
        for name in sorted(self._environ):
            if not name.upper().startswith(_OVERRIDE_PREFIX):
                continue
            *sections, last = name[len(_OVERRIDE_PREFIX) :].split("__")
            if [*sections, last][0].lower() in self._problems.ignored:
                continue
            node: dict[str, Any] = self._tree
            path: KeyPath = ()
            for section in sections:
                key = _key_for(section, [*node, *known_keys(path)], path)
                path = (*path, key)
                if not isinstance(node.get(key), dict):
                    node[key] = {}
                locations.setdefault(path, name)
                node = node[key]
            key = _key_for(last, [*node, *known_keys(path)], path)
            path = (*path, key)
            node[key] = _override_value(self._environ[name])
            for known in (locations, self._references.texts):
                for overridden in [each for each in known if each[: len(path)] == path]:
                    del known[overridden]
            locations[path] = name

    def _named_files(self) -> dict[str, list[Path]]:
        """Return the function and pipeline files that exist, and report the others."""
        found: dict[str, list[Path]] = {section: [] for section in _FILE_LISTS}
        for section, files in found.items():
            names = self._tree.get(section)
            for index, name in enumerate(names if isinstance(names, list) else ()):
                path = (section, index)
                if not isinstance(name, str) or path in self._references.unresolved:
                    continue  # reported already
                if (file := self._folder / name).is_file():
                    files.append(file)
                else:
                    self._report(path, f"file not found: {file}")
        return found

    def _with_absolute_paths(self, config: HeadraceConfig) -> HeadraceConfig:
        """Return the configuration with absolute paths, and report files that do not exist."""
        folder = self._folder
        files = {section: [folder / file for file in getattr(config, section)] for section in _FILE_LISTS}
        security = located(config.kafka.security, ("kafka", "security"), self._references)
        located_values = {name: self._located(name, value) for name, value in config if name in config.model_fields_set}
        return config.model_copy(
            update={
                **located_values,
                **files,
                "kafka": config.kafka.model_copy(update={"security": security}),
                "audit": config.audit.model_copy(update={"file": folder / config.audit.file}),
                "state_dir": folder / config.state_dir,
                "http": self._http(config.http),
                "cluster": self._with_files(config.cluster, "cluster", "tls"),
                "security": self._with_files(config.security, "security", "jwt"),
            }
        )

    def _http(self, http: HttpConfig) -> HttpConfig:
        if http.management:
            management = self._with_files(http.management, "http", "management", "tls")
            http = http.model_copy(update={"management": management})
        return self._with_files(http, "http", "tls")

    def _located(self, name: str, value: Any) -> Any:
        """Return the value of a section with absolute paths: a server, or consumers by name; another as it is."""
        if isinstance(value, RemoteServer):
            return self._remote(value, name)
        if not isinstance(value, dict):
            return value
        return {key: self._pushed(each, name, key) for key, each in value.items()}

    def _pushed(self, entry: Any, *at: str) -> Any:
        backend = getattr(entry, "backend", None)
        if not isinstance(backend, BackendConfig):
            return entry
        return entry.model_copy(update={"backend": self._with_files(backend, *at, "backend", "tls")})

    def _remote(self, server: RemoteServer, name: str) -> RemoteServer:
        """Return a server with absolute paths, and with a password that is read again."""
        server = self._with_files(server, name, "tls")
        if password := self._references.texts.get((name, "password")):
            again = ReferredSecret(server.password, password, self._folder)
            server = server.model_copy(update={"password": again})
        return server

    def _with_files(self, section: AnySection, *at: str) -> AnySection:
        """Return a section whose last part of the path has absolute paths, and report files that do not exist."""
        inner: Section = getattr(section, at[-1])
        files = {name: self._folder / value for name, value in inner if isinstance(value, Path)}
        for name, file in files.items():
            path = (*at, name)
            if not is_file(file):
                sentence = f"file not found: {file}"
                if name == "key" or path in self._references.texts:  # it may be the key itself, or another secret
                    sentence = f"{self._references.name_of(path)}is not the path of a file: correct the path"
                self._report(path, sentence)
            elif name == "key":
                self._references.check_mount(file, path)
        return section.model_copy(update={at[-1]: inner.model_copy(update=files)})


def _is_blocked(node: Any, path: KeyPath) -> bool:
    """Return whether something on a path is there and is not a map."""
    for part in path:
        if not isinstance(node, dict):
            return True
        if part not in node:
            return False
        node = node[part]
    return not isinstance(node, dict)


def _has_path(node: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _key_for(part: str, known: list[str], path: KeyPath) -> str:
    """Return the key for a part of a variable's name: variables have no case, dots or hyphens."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "_", name.lower())

    new = part.lower().replace("_", ".") if path[-1:] == _PROPERTIES[-1:] else part.lower()
    return next((key for key in known if plain(key) == plain(part)), new)


def _override_value(text: str) -> Any:
    if text[:1] not in ("[", "{"):
        return text
    problems = Problems()
    found = read_tree(text, "", problems)
    return text if problems.found else found


def unprotected(config: HeadraceConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield each protective setting that has no effect: its path, and what to do.

    Such a setting is rejected, because the process would look protected.
    """
    security = config.security
    if security.mode == "none" and (security.principals or security.jwt != JwtConfig()):
        sentence = "principals or jwt are set, but mode is none, so every caller may do everything: set mode"
        yield ("security",), sentence
    if security.mode == "jwt" and security.principals:
        sentence = "has no effect in mode jwt, where tokens carry the scopes: remove it, or set another mode"
        yield ("security", "principals"), sentence
    for _, server in config:
        if isinstance(server, RemoteServer) and server.password.get_secret_value() and not server.username:
            yield (server.section, "password"), "is not sent without a username: set username, or remove it"
