"""Writes what a light-4j folder sets into the tree that `headrace.yaml` gives, each value with its location."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from headrace.config.kafka_java import SECURITY_KEYS
from headrace.config.references import is_secret_name, too_open
from headrace.config.spelling import hint, nearest
from headrace.config.yaml_tree import KeyPath, Problems
from headrace_dialects.light4j.folder import LightFolder
from headrace_dialects.light4j.key_table import FILES, LightKey, keys_of, row_of
from headrace_dialects.light4j.placeholders import Setting, typed
from headrace_dialects.light4j.server_settings import listener, pem_store, pushed_metrics, token_check

NAME: Final = "light4j"
"""Name of the reactive consumer."""
_QUERY: Final = "ksqldb"
"""Name of the standing query, which is also a consumer."""
_PREFIXES: Final = {
    "reactive": ("reactive_consumers", NAME),
    "active": ("active_consumers",),
    "query": ("queries", _QUERY),
}
_HOOKS: Final = {
    "ProducerStartupHook": "producer",
    "ActiveConsumerStartupHook": "active",
    "ReactiveConsumerStartupHook": "reactive",
    "KsqldbActiveConsumerStartupHook": "ksqldb",
    "KsqldbReactiveConsumerStartupHook": "query",
    "KsqldbConsumerStartupHook": "query",
    "AdminClientStartupHook": "",
    "AuditProducerStartupHook": "",
    "MessageReplayStreamStartupHook": "",
}
"""Features by hook. What has no feature here is always there."""
_DEFAULT_HOOKS: Final = ["ProducerStartupHook", "ReactiveConsumerStartupHook", "KsqldbActiveConsumerStartupHook"]
"""Those of the packaged `values.yml`; a folder with its own has the first only."""
_SECTIONS: Final = {"reactive_consumers": "reactive", "active_consumers": "active", "queries": "query"}
"""Features by section."""
_PACKAGE: Final = "com.networknt.mesh.kafka."
_STARTUP: Final = "com.networknt.server.StartupHookProvider"
_NEEDS: Final = {
    "kafka-producer": ("producer",),
    "kafka-consumer": ("active", "reactive"),
    "kafka-ksqldb": ("ksqldb", "query"),
}
"""Features that read a file."""
_SHARED: Final = ("kafka", "schema_registry", "audit")
"""Sections that producers and consumers share here."""
_FOR_CLIENTS: Final = {"format_codes": "light-4j", "unknown_fields": "ignore", "always_200": True}
"""What clients of light-4j's producer depend on."""


def write_tree(folder: LightFolder, tree: dict[str, Any], problems: Problems) -> None:
    """Write the settings of a folder into an empty tree; problems and keys without effect are in the folder."""
    _Translation(folder, tree, problems).run()


def remarks_of(folder: LightFolder) -> list[str]:
    """Return a sentence for each reason for which keys of a file have no effect."""
    return [f"{file}: {', '.join(keys)}: no effect, because {why}" for (file, why), keys in folder.remarks.items()]


class _Translation:
    """The tree as far as it is written, and the features that the hooks switch on."""

    def __init__(self, folder: LightFolder, tree: dict[str, Any], problems: Problems) -> None:
        self._folder, self._settings, self._tree, self._problems = folder, folder.settings, tree, problems
        self._features: set[str] = set()
        self._sources: dict[KeyPath, Setting] = {}
        self._opened: set[str] = set()
        self._assumed: set[KeyPath] = set()
        """Sections that only defaults have named so far."""

    def run(self) -> None:
        self._read_hooks()
        for file in FILES:
            needs = _NEEDS.get(file, ())
            for key, found in self._settings[file].items():
                if needs and not self._features.intersection(needs):
                    self._remark(file, key, found, f"none of the hooks that read {file}.yml is listed")
                elif file not in ("service", "config"):
                    self._write(file, key, found)
        self._write_switches()
        self._write_audit()
        self._write_backend()
        self._write_health()
        self._write_ksqldb()
        for path, found, value in (*listener(self._folder), *token_check(self._folder), *pushed_metrics(self._folder)):
            self._set(path, found, value)

    def _read_hooks(self) -> None:
        hooks = next((found for key, found in self._settings["service"].items() if key.endswith(_STARTUP)), None)
        singletons = self._settings["service"].get("singletons")
        for entry in singletons.value if singletons and isinstance(singletons.value, list) else ():
            if singletons and isinstance(entry, dict) and _STARTUP in entry:
                hooks = singletons._replace(value=entry[_STARTUP])
        names = (
            hooks.value
            if hooks and isinstance(hooks.value, list)
            else re.findall(r"[\w.]+", str(hooks and hooks.value))
        )
        if not hooks:
            defaults = _DEFAULT_HOOKS[:1] if self._folder.has_file("values") else _DEFAULT_HOOKS
            names = [] if self._folder.has_file("service") else defaults
        for name in map(str, names):
            plain = name.rpartition(".")[2]
            found = (hooks or Setting(None, "", ""))._replace(key=plain)
            if plain in _HOOKS and (name.startswith(_PACKAGE) or name == plain):
                self._features.add(_HOOKS[plain])
            elif name.startswith(_PACKAGE):
                self._folder.refuse(found, f"is not a hook of the sidecar: {hint(plain, _HOOKS)}")
            else:
                why = "it is a Java class: write a function, a standing query or a pipeline instead"
                self._folder.remark(found, why)

    def _write(self, file: str, key: str, found: Setting) -> None:
        """Write one key, or report it."""
        row = row_of(file, key)
        if row is None:
            if file.startswith("kafka-"):
                self._folder.refuse(found, f"unknown key: {hint(key, keys_of(file))}")
            else:
                near = nearest(key.rpartition(".")[2], keys_of(file))
                why = "Headrace does not know this key"
                self._folder.remark(found, f"{why}; did you mean {near}?" if near else why)
        elif row.why_refused and found.is_on:
            self._folder.refuse(found, row.why_refused)
        elif row.why_nothing:
            self._remark(file, key, found, row.why_nothing)
        elif row.targets and not any(map(self._is_on, map(setting_path, row.targets))):
            section = str(setting_path(row.targets[0])[0])
            hook = next(name for name, feature in _HOOKS.items() if feature == _SECTIONS[section])
            self._remark(file, key, found, f"{hook} is not listed")
        elif row.how != "special":
            self._convert(row, found)

    def _remark(self, file: str, key: str, found: Setting, why: str) -> None:
        """List a key without effect, unless it is a default in a file, which may be a copy of the packaged one."""
        row = row_of(file, key)
        if found.key != key or not row or found.value != typed(row.default):
            self._folder.remark(found, why)

    def _convert(self, row: LightKey, found: Setting) -> None:
        value = CONVERSIONS[row.how](found.value) if row.how in CONVERSIONS else found.value
        if row.how == "milliseconds" and not isinstance(value, float):
            return self._folder.refuse(found, "is not a number of milliseconds: correct it")
        values = str(value).split(":", 1) if row.how == "pair" else [value] * len(row.targets)
        if len(values) < len(row.targets):
            return self._folder.refuse(found, "is not a user and a password: write user:password")
        if row.how in ("path", "store") and isinstance(found.value, str):
            path = self._folder.path_of(found.value)
            if not found.written and not path.is_file():  # the authorities of the system are trusted
                return None
            values = [str(path)]
        url = self._folder.get(row.file, "properties.schema.registry.url")
        if row.how == "pair" and found.packaged and not url.written:
            return None  # otherwise the start would wait for a registry that nothing needs
        if row.how == "store":
            if not str(url.value).startswith("https:"):
                return self._folder.remark(found, "the URL of the schema registry is not https")
            if not pem_store(self._folder, found, with_key=False):
                return None
        for target, value in zip(row.targets, values, strict=True):
            at = setting_path(target)
            if value is not None and self._is_on(at):
                self._share(at, found, value, row) if at[0] in _SHARED else self._set(at, found, value)
        return None

    def _is_on(self, path: KeyPath) -> bool:
        return _SECTIONS.get(str(path[0]), "") in {"", *self._features}

    def _share(self, path: KeyPath, found: Setting, value: Any, row: LightKey) -> None:
        """Write a setting that producers and consumers share; the first of the files decides."""
        first = self._sources.get(path)
        if first is None:
            return self._set(path, found, value)
        if value == _at(self._tree, path):
            return None
        what = row.key.removeprefix("properties.")
        if path[0] == "kafka" and what in SECURITY_KEYS:
            sentence = f"differs from {first.label}, and all clients share one login: write the same in both files"
            return self._folder.refuse(found, f"{sentence}, for a user who may do both")
        return self._folder.remark(found, f"all clients share {first.label}")

    def _set(self, path: KeyPath, found: Setting, value: Any) -> None:
        node: dict[Any, Any] = self._tree
        locations = self._problems.locations
        for end, part in enumerate(path[:-1], 1):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):  # the loader refuses it
                return
            if path[:end] not in locations or (found.written and path[:end] in self._assumed):
                locations[path[:end]] = found.location
                (self._assumed.add if found.packaged else self._assumed.discard)(path[:end])
        node[path[-1]] = value
        locations[path], self._sources[path] = found.label, found
        file = found.secret.rpartition(":")[0]
        if file and is_secret_name(str(path[-1])) and file not in self._opened:
            self._opened.add(file)
            if why := too_open(Path(file), mounted=Path(file).is_symlink(), instead="set an environment variable"):
                self._folder.refuse(found._replace(location=found.secret, key=""), why)

    def _write_switches(self) -> None:
        """Turn off what no hook switches on, and keep what light-4j's clients depend on."""
        hooks = self._settings["service"].get(_STARTUP, Setting(None, "(hooks)", "", written=False))
        for feature, section in (("producer", "producer"), ("active", "active_consumers")):
            if feature not in self._features:
                self._set((section, "enabled"), hooks, False)
        for name, value in _FOR_CLIENTS.items() if "producer" in self._features else ():
            self._set(("producer", name), hooks, value)
        plain = self._folder.get("kafka-consumer", "useNoWrappingAvro")
        if self._features & {"reactive", "active"} and plain.is_on:
            self._set(("schema_registry", "avro_unions"), plain, "plain")

    def _write_audit(self) -> None:
        """Write the target of the audit: the first file that has one decides."""
        files = [file for file in ("kafka-producer", "kafka-consumer") if self._features.intersection(_NEEDS[file])]
        for file in files:
            enabled, target = self._folder.get(file, "auditEnabled"), self._folder.get(file, "auditTarget")
            to = ("topic" if target.value == "topic" else "file") if enabled.is_on else "none"
            row = LightKey(file, "auditTarget", "", "", "", "audit.to", "")
            self._share(("audit", "to"), target if enabled.is_on else enabled, to, row)
        if files:
            self._set(("audit", "records"), self._sources["audit", "to"], "all")

    def _write_backend(self) -> None:
        if "reactive" not in self._features:
            return
        at: KeyPath = ("reactive_consumers", NAME)
        host, path = (
            self._folder.get("kafka-consumer", "backendApiHost"),
            self._folder.get("kafka-consumer", "backendApiPath"),
        )
        self._set((*at, "backend", "url"), host if host.written else path, _url(host.value, path.value))
        if "properties.group.id" not in self._settings["kafka-consumer"]:
            group = host._replace(location=f"{self._folder.folders[0]}/kafka-consumer.yml:1", key="properties.group.id")
            self._folder.refuse(group, "is missing: add it")
            self._set((*at, "group"), group, "missing")
        dead_letters = self._folder.get("kafka-consumer", "deadLetterEnabled")
        self._set((*at, "dead_letter", "enabled"), dead_letters, dead_letters.value)
        if not dead_letters.is_on:  # light-4j drops such records
            self._set((*at, "retry", "last_retry"), dead_letters, True)
        checked = self._folder.get("health", "downstreamPath")
        if self._folder.get("health", "downstreamEnabled").is_on and isinstance(checked.value, str):
            self._set((*at, "backend", "health", "path"), checked, checked.value)
        for key, names in (("trustStore", ["ca"]), ("keyStore", ["certificate", "key"])):
            store = next((one for name, one in self._settings["client"].items() if name.endswith(key)), None)
            if store and store.written and not str(host.value).startswith("https:"):
                self._folder.remark(store, "the backend is not https")
            elif store and store.written and pem_store(self._folder, store, with_key=len(names) > 1):
                for name in names:
                    self._set((*at, "backend", "tls", name), store, str(self._folder.path_of(str(store.value))))

    def _write_health(self) -> None:
        """Write the check of the backend; without a host of its own it goes to the one that gets the records."""
        get = functools.partial(self._folder.get, "health")
        enabled, host, path = get("downstreamEnabled"), get("downstreamHost"), get("downstreamPath")
        if not enabled.is_on:
            for one in (host, path):
                if one.written:
                    self._folder.remark(one, "downstreamEnabled is not true")
            return
        pushed = self._folder.get("kafka-consumer", "backendApiHost")
        base = host if host.written or "reactive" not in self._features else pushed
        source = next((one for one in (path, host, enabled) if one.written), enabled)
        url = _url(base.value, path.value) if isinstance(path.value, str) else path.value
        self._set(("health", "downstream_url"), source, url)

    def _write_ksqldb(self) -> None:
        if not self._features & {"ksqldb", "query"}:
            return
        get = functools.partial(self._folder.get, "kafka-ksqldb")
        host, port, tls, store = get("ksqldbHost"), get("ksqldbPort"), get("useTls"), get("trustStore")
        scheme = "https" if tls.is_on else "http"
        self._set(("ksqldb", "url"), host if host.written else port, f"{scheme}://{host.value}:{port.value}")
        if store.written and scheme == "http":
            self._folder.remark(store, "useTls is off")
        elif store.written and pem_store(self._folder, store, with_key=False):
            self._set(("ksqldb", "tls", "ca"), store, str(self._folder.path_of(str(store.value))))
        if "query" not in self._features:
            return
        query, url, path = get("query"), get("backendUrl"), get("backendPath")
        self._set(("queries", _QUERY, "backend", "url"), url if url.written else path, _url(url.value, path.value))
        self._set(("queries", _QUERY, "backend", "mode"), url, "single")
        self._set(("queries", _QUERY, "rows"), query, "arrays")
        named = re.search(r"\bfrom\s+(\w+)", str(query.value), re.IGNORECASE)
        table = named[1] if named else "NAME"
        variable = f"HEADRACE__TABLES__{table.upper()}"
        if not any(name.upper().startswith("HEADRACE__TABLES") for name in self._folder.environ):
            why = f"reads {table}, which is a stream of the ksqlDB server, and Headrace needs a table with its topic"
            text = f"{why}: set {variable}='{{topic: its topic, schema: its columns}}', or remove the hook"
            self._folder.refuse(query, text)
            self._tree.pop("queries", None)


def setting_path(target: str) -> KeyPath:
    """Return the path of a setting; a name of Kafka is one part of it."""
    section, properties, name = target.partition(".properties.")
    first, *parts = section.split(".")
    path = (*_PREFIXES.get(first, (first,)), *parts)
    return (*path, "properties", name) if properties else path


def _at(tree: Mapping[str, Any], path: KeyPath) -> Any:
    node: Any = tree
    for part in path:
        node = node[part]
    return node


def _url(host: Any, path: Any) -> str:
    return f"{str(host).rstrip('/')}/{str(path or '').lstrip('/')}"


def _number(convert: Callable[[float], float | None]) -> Callable[[Any], Any]:
    """Return a conversion of a number; any other value stays, and the loader reports it."""

    def converted(value: Any) -> Any:
        try:
            return value if isinstance(value, bool) else convert(float(value))
        except (TypeError, ValueError, OverflowError):
            return value

    return converted


CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "text": str,
    "lower": lambda value: str(value).lower(),
    "milliseconds": _number(lambda value: value / 1000),
    "percent": _number(lambda value: value - 0.01 if value > 0 else value),  # there N percent is enough
    "least": _number(lambda value: int(value) if value >= 0 else None),
    "one_more": _number(lambda value: int(value) + 1),
    "extension": lambda value: f"{{topic}}{value}",
    "list": lambda value: [*filter(None, re.split(r"[\s,]+", value))] if isinstance(value, str) else value,
    "statement": lambda value: str(value).rstrip("; \n"),
}
"""By `how` of a row."""
