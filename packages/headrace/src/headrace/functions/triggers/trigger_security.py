"""TLS and login of a Kafka trigger: Nuclio's attributes, annotations and mounted secrets, as one `KafkaSecurity`."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity, is_pem, located
from headrace.config.references import FileReferences, is_file
from headrace.config.yaml_tree import KeyPath
from headrace.functions.function_keys import LOGIN
from headrace.functions.sections import FileReader

_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(key.becomes.strip("`").split(".")) for name, key in LOGIN.items() if key.becomes.startswith("`")
}
"""Attributes, and their setting in `KafkaSecurity`."""
_CERTIFICATE: Final = "certificate"
_REPORTED: Final = "-"
"""Replaces a value whose problem is reported; must not be empty."""
_BOOL: Final = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "FALSE", "false", "False"), False
)
"""Source: Go's strconv.ParseBool."""
_NAMES: Final = {path[-1]: name.rpartition(".")[2] for name, path in _SETTINGS.items() if path[-1] != "ca"}
_PHRASES: Final = {
    "tls.verify_certificate is false": "tls.insecureSkipVerify is true",
    "protocol is sasl_plaintext": "tls.enable is false",
    ": use sasl_ssl": ": write true",
    "is encrypted: set key_password": "is encrypted: write it without a password, by `openssl pkey -in OLD -out NEW`",
    "tls.certificate": "accessCertificate",
    ", or set ssl.keystore.location to a PKCS#12 file": "",
}
_MODEL_NAME: Final = re.compile(rf"\b({'|'.join(_NAMES)})\b")


class Written(NamedTuple):
    """A value of the file, and where it is."""

    value: Any
    path: KeyPath


class SecurityReader:
    """Makes the `KafkaSecurity` of one trigger, and reports what is wrong."""

    def __init__(self, written: Mapping[str, Written], attributes: KeyPath, file: FileReader) -> None:
        """Take what is written, by the names in `LOGIN`, and the path of the attributes."""
        self._written = written
        self._attributes = attributes
        self._folder = file.file.parent
        self._wrong = file.wrong
        self._warn = file.warn
        self._is_wrong = False
        self._references = FileReferences(file.file, self._folder, os.environ, self._report_setting)

    def read(self) -> KafkaSecurity | None:
        """Return the trigger's TLS and login; None if it says nothing of them.

        Raises:
            ValidationError: Of `KafkaSecurity`; `explained` translates it to the names of the file.
        """
        tls, sasl = self._switch("tls.enable"), bool(self._switch("sasl.enable"))
        has_tls = bool(tls or {"caCert", "accessCertificate", "accessKey"} & self._written.keys())
        if sasl and tls is None and not has_tls:
            text = "is not written, so the login uses TLS: write enable: true, or false for brokers without TLS"
            self._warn((*self._attributes, "tls"), text)
            has_tls = True
        self._check_unused("tls", has_tls)
        self._check_unused("sasl", sasl)
        if self._switch("sasl.handshake") is False:
            self._report("sasl.handshake", "is false, and Kafka's client always sends the handshake: remove it")
        values: dict[str, Any] = {"tls": self._values("tls")} if has_tls else {}
        if has_tls and self._switch("tls.insecureSkipVerify"):
            values["tls"] |= {"verify_certificate": False, "verify_host_name": False}
        if sasl:
            values["sasl"] = {"mechanism": "PLAIN", **self._values("sasl")}
        if not has_tls and (sasl or tls is False):
            values["protocol"] = "sasl_plaintext" if sasl else "plaintext"
        found = KafkaSecurity.model_validate(values)
        return located(found, (), self._references) if values and not self._is_wrong else None

    def path_of(self, setting: KeyPath) -> KeyPath:
        """Return the path in the file of a setting of `KafkaSecurity`, or of the first one in a section of it."""
        names = [name for name, path in _SETTINGS.items() if path[: len(setting)] == setting[: len(path)]]
        written = [self._written[name].path for name in names if name in self._written]
        return written[0] if written else (*self._attributes, *names[0].split("."))

    def explained(self, cause: ValidationError) -> list[ErrorDetails]:
        """Return the errors of the model at the paths and with the names of the file."""
        errors = cause.errors(include_url=False, include_input=False)
        for error in errors:
            error["loc"], error["msg"] = self.path_of(error["loc"]), in_nuclio_names(error["msg"])
        return errors

    def _check_unused(self, section: str, enabled: bool) -> None:
        """Judge the settings of a section that is not enabled: a forgotten switch must not drop protection."""
        switches = (f"{section}.enable", "sasl.handshake")
        names = [name for name in self._written if name.startswith(f"{section}.") and name not in switches]
        if enabled or not names:
            return
        if switches[0] in self._written:
            self._warn(self._written[names[0]].path, f"has no effect, because {section}.enable is false")
        else:
            self._report(names[0], f"has no effect without {section}.enable: write true to use it, false for none")

    def _values(self, section: str) -> dict[str, Any]:
        """Return the written settings of a section as the model has them."""
        found: dict[str, Any] = {}
        for name, path in _SETTINGS.items():
            if path[:1] == (section,) and name in self._written:
                node = found
                for part in path[1:-1]:
                    node = node.setdefault(part, {})
                if path[-1] in node:
                    self._report(name, "is written in two spellings: keep one")
                node[path[-1]] = self._value(name, path)
        return found

    def _value(self, name: str, path: KeyPath) -> Any:
        value = self._written[name].value
        try:
            is_secret = isinstance(value, str) and LOGIN[name].type in (_CERTIFICATE, "secret")
            text = self._secret(name, value) if is_secret else value
        except ValueError as cause:
            self._report(name, str(cause))
            return _REPORTED
        found = self._references.replaced(text, path)
        if not isinstance(found, str):
            return found
        if LOGIN[name].type == "list":
            self._references.texts.pop(path, None)  # it replaces a part only
            return [part.strip() for part in found.split(",")]
        return _REPORTED if path in self._references.unresolved else found

    def _secret(self, name: str, value: str) -> str:
        """Return a certificate or secret as a text, the path of a file, or a reference to one. No error shows it."""
        is_certificate = LOGIN[name].type == _CERTIFICATE
        folder = str(self._written["secretPath"].value) if "secretPath" in self._written else ""
        if is_pem(value) or "${" in value:
            return value
        if not is_certificate and not folder and not value.startswith(("/", "./", "../")):
            return value  # the secret itself
        file = Path(os.path.normpath(self._folder / folder / value))
        if not is_file(file):
            other = "or write PEM text" if is_certificate else "or remove secretPath if this is the secret"
            under = f" under secretPath ({folder})" if folder and not value.startswith("/") else ""
            advice = f", {other}" if folder or is_certificate else ""
            raise ValueError(f"names no file{under}: correct the name, or create the file{advice}")
        return str(file) if is_certificate and not _is_flattened(file) else f"${{file:{file}}}"

    def _switch(self, name: str) -> bool | None:
        found = _BOOL.get(str(self._written[name].value)) if name in self._written else None
        if found is None and name in self._written:
            self._report(name, "is neither true nor false: write one of them")
        return found

    def _report(self, name: str, sentence: str) -> None:
        self._is_wrong = True
        self._wrong(self._written[name].path, sentence)

    def _report_setting(self, setting: KeyPath, sentence: str) -> None:
        self._is_wrong = True
        self._wrong(self.path_of(setting), in_nuclio_names(sentence))


def _is_flattened(file: Path) -> bool:
    """Return whether a file is PEM text in one line; one that cannot be read is not."""
    try:
        content = file.read_bytes().strip()
    except OSError:
        return False
    return b"\n" not in content and b"-----BEGIN" in content


def in_nuclio_names(sentence: str) -> str:
    """Return a sentence about `KafkaSecurity` with the names that function files have."""
    for phrase, replacement in _PHRASES.items():
        sentence = sentence.replace(phrase, replacement)
    words = sentence.split(" ")  # one with a slash or $ is part of a path or a reference
    return " ".join(
        word if {*"/$"} & {*word} else _MODEL_NAME.sub(lambda name: _NAMES[name[0]], word) for word in words
    )


def cluster_problem(security: KafkaSecurity | None, brokers: Sequence[str], kafka: KafkaConfig) -> str:
    """Return why a trigger's TLS and login do not fit the cluster in headrace.yaml; empty if they do."""
    protocol, tls = kafka.security.effective_protocol, kafka.security.tls
    own = security.effective_protocol if security else "plaintext"
    if not kafka.is_at(brokers):
        if security or protocol == "plaintext":
            return ""
        return (
            f"names other brokers without TLS and login, while headrace.yaml reaches its brokers by {protocol}, which "
            "does not apply here: write tls and sasl here, or tls.enable: false for plain text"
        )
    if security is None:
        return ""
    if own != protocol:
        return (
            f"has {own} on the brokers of headrace.yaml, which are reached by {protocol} there: write the same here, "
            "or name the brokers of another listener under brokers"
        )
    if tls and tls.ca and security.tls and not security.tls.ca and security.tls.verify_certificate:
        return "has TLS of its own without caCert, and kafka.security.tls.ca of headrace.yaml is not taken over: add it"
    return ""
