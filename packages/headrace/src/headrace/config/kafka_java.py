"""Security properties of Java's Kafka clients, light-4j's files and librdkafka, translated into `kafka.security`."""

import copy
import csv
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from headrace.config.yaml_tree import KeyPath

with Path(__file__).with_name("security_keys.csv").open(newline="") as _table:
    SECURITY_KEYS: Final = {row["key"]: row["setting"] for row in csv.DictReader(_table)}
"""Each property, and the setting below `kafka.security` that replaces it."""
BY_PROPERTY: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "tls.keystore": ("ssl.keystore.location", lambda path: path),
    "tls.keystore_password": ("ssl.keystore.password", lambda password: password),
    "tls.min_version": ("ssl.enabled.protocols", lambda least: {"TLSv1.2": "TLSv1.2,TLSv1.3"}.get(least, least)),
    "sasl.oauth.extensions": (
        "sasl.oauthbearer.extensions",
        lambda pairs: ",".join(f"{name}={value}" for name, value in pairs.items()),
    ),
}
"""Settings that no file has, each with the property that sets it and the property's text for a value."""
PROPERTIES_ALONE: Final = frozenset(name for name, setting in SECURITY_KEYS.items() if setting in BY_PROPERTY)
"""Properties that may be written in addition to `kafka.security`."""
_HELPERS: Final = {"ssl.keystore.type", "ssl.truststore.password", "ssl.truststore.type"}
"""Properties that are not needed: the type of a store is found from its content."""
_MECHANISMS: Final = {"PlainLoginModule": "PLAIN", "ScramLoginModule": "SCRAM", "OAuthBearerLoginModule": "OAUTHBEARER"}
_OPTIONS: Final = {
    "username": "username",
    "password": "password",
    **dict.fromkeys(("clientId", "oauth.client.id"), "oauth.client_id"),
    **dict.fromkeys(("clientSecret", "oauth.client.secret"), "oauth.client_secret"),
    **dict.fromkeys(("scope", "oauth.scope"), "oauth.scopes"),
    "oauth.token.endpoint.uri": "oauth.token_url",
}
"""Options of login modules, and the settings below `kafka.security.sasl`; `oauth.*` are Strimzi's."""
_TOKEN: Final = re.compile(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s"'=;]+)|([=;])|\s+""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\([0-3]?[0-7]{1,2}|.)", re.DOTALL)
_ESCAPED: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def parse_jaas(line: str) -> dict[str, Any]:
    """Translate a JAAS line into settings below `kafka.security.sasl`, and its module.

    Source: JaasConfig of Kafka's clients, which reads the line with Java's StreamTokenizer.

    Raises:
        ValueError: The line is malformed, or has an unsupported option. The text never has a value.
    """
    kinds, texts, end = "", [], 0
    while match := _TOKEN.match(line, end):
        end = match.end()
        if not match[0].isspace():
            kinds += match[4] or ("w" if match[3] else "v")
            texts.append(match[3] or _ESCAPE.sub(_unescaped, match[1] or match[2] or ""))
    if end < len(line) or not re.fullmatch(r"ww(w=[wv])*;", kinds):
        raise ValueError(
            'is not a valid JAAS line: write one such as \'module.Name required username="u" password="p";\', all of '
            "it in single quotes, each value in double quotes, and one semicolon at the end"
        )
    _mechanism_of(texts[0])
    settings: dict[str, Any] = {"module": texts[0]}
    for option, value in zip(texts[2:-1:3], texts[4:-1:3], strict=True):
        extension = option.removeprefix("extension_")
        setting = f"oauth.extensions.{extension}" if extension != option else _OPTIONS.get(option)
        if not setting:
            raise ValueError(f"has the option {option}, which is not supported: remove it, or choose another login")
        settings[setting] = value.split() if setting == "oauth.scopes" else value
    return settings


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8)) if match[1][0] in "01234567" else _ESCAPED.get(match[1], match[1])


def with_jaas(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of `kafka.security.sasl` in which `jaas.config` and `module` are translated.

    Raises:
        ValueError: The line is malformed, or its module is not supported or for another mechanism.
    """
    found: dict[str, Any] = copy.deepcopy(dict(settings))
    line = found.pop("jaas.config", None)
    for name, value in parse_jaas(str(line)).items() if line is not None else ():
        node = found
        *sections, last = name.split(".", 2)
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    if not (module := found.pop("module", "")):
        return found
    mechanism, written = _mechanism_of(str(module)), str(found.get("mechanism", ""))
    if not written and mechanism == "SCRAM":
        raise ValueError("has ScramLoginModule and no mechanism: set SCRAM-SHA-256 or SCRAM-SHA-512")
    if written and written.upper().partition("-")[0] != mechanism:
        raise ValueError(f"has a login module of {mechanism} and the mechanism {written}: change one of them")
    return {**found, "mechanism": written or mechanism}


def _mechanism_of(module: str) -> str:
    name = module.partition(" ")[0].rpartition(".")[2]
    if name not in _MECHANISMS:
        named = f" {name}" if name.endswith("LoginModule") else ""  # it may be a secret
        raise ValueError(f"names the login module{named}, which is not supported: use {', '.join(_MECHANISMS)}")
    return _MECHANISMS[name]


def translated(name: str, properties: Mapping[str, Any]) -> Iterator[tuple[KeyPath, KeyPath, Any]]:
    """Yield the settings below `kafka.security` that replace one of these properties.

    Each has the path, below the properties, that it is read from.

    Raises:
        ValueError: The property has a value that is not supported.
    """
    path, value = tuple(SECURITY_KEYS[name].split(".")), properties[name]
    if name == "sasl.jaas.config" and isinstance(value, dict):
        for setting, item in value.items():
            yield (name, setting), ("sasl", *setting.split(".", 2)), item
    elif name in ("sasl.jaas.config", "sasl.jaas.config.module"):
        yield (name,), ("sasl", "module" if name.endswith("module") else "jaas.config"), value
    elif name == "sasl.oauthbearer.method":
        _require(str(value).lower() == "oidc", "oidc")
    elif name == "sasl.oauthbearer.scope":
        yield (name,), path, str(value).split()
    elif name == "sasl.oauthbearer.extensions":
        pairs = [pair.partition("=") for pair in str(value).split(",")]
        yield (name,), path, {key.strip(): item for key, _, item in pairs}
    elif name == "ssl.keystore.location" and str(properties.get("ssl.keystore.type")).upper() == "PEM":
        yield from (((name,), ("tls", setting), value) for setting in ("certificate", "key"))
    elif name == "ssl.endpoint.identification.algorithm":
        _require(value in ("https", "none", ""), "https, or an empty text for no check of host names")
        yield (name,), path, value == "https"
    elif name == "ssl.enabled.protocols":
        versions = sorted(str(value).replace(" ", "").split(","))
        _require(versions in (["TLSv1.3"], ["TLSv1.2", "TLSv1.3"]), "TLSv1.3, or both TLSv1.2 and TLSv1.3")
        yield (name,), path, versions[0]
    elif name == "ssl.protocol":  # the newest version that both sides have is used
        _require(value in ("TLS", "TLSv1.2", "TLSv1.3"), "TLSv1.2 or TLSv1.3")
    elif name == "ssl.key.password" and value == properties.get("ssl.keystore.password"):
        return  # one password protects all of a PKCS#12 file
    elif name not in _HELPERS and value != "":
        yield (name,), path, value


def _require(fits: bool, choices: str) -> None:
    if not fits:
        raise ValueError(f"has a value that is not supported: set {choices}")


def write_back(kafka: Any) -> None:
    """Write what only a property sets as that property into a section `kafka`, so that a file may have it."""
    security = kafka.get("security") if isinstance(kafka, dict) else None
    for setting, (name, text_of) in BY_PROPERTY.items():
        *parts, last = setting.split(".")
        node = security
        for part in parts:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            kafka.setdefault("properties", {})[name] = text_of(node.pop(last))
