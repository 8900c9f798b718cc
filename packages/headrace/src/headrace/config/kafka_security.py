"""TLS and login of Kafka's clients: one model for `headrace.yaml`, for triggers of functions, and for pipelines."""

from __future__ import annotations

import datetime as dt
import os
import re
import shlex
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError, model_validator

from headrace.config.backend import encrypted
from headrace.config.kafka_java import with_jaas
from headrace.config.references import FileReferences, ReferenceProblem, files_in, is_file, resolve
from headrace.config.section import Section, Url
from headrace.config.yaml_tree import KeyPath
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.serialization.pkcs12 import PKCS12KeyAndCertificates

TlsVersion = Annotated[Literal["1.2", "1.3"], BeforeValidator(lambda value: str(value).removeprefix("TLSv"))]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
Protocol = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
_PEM_START: Final = "-----BEGIN"
_JKS: Final = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")


def is_pem(value: str) -> bool:
    """Return whether a value is the text of certificates or keys; otherwise it is the path of a file."""
    return _PEM_START in value


def _mechanism(value: Any) -> Any:
    if str(value).upper() in ("GSSAPI", "KERBEROS"):
        raise ValueError(f"is {value} (Kerberos), which is not supported: set SCRAM or OAUTHBEARER")
    return str(value).upper()


def _unflattened(value: Any) -> Any:
    """Return PEM text with line breaks; in variables and annotations the lines are often joined by blanks or `@`."""
    if not isinstance(value, str) or not is_pem(value) or "\n" in value.strip():
        return value
    labels = re.sub(r"-----(BEGIN|END) [A-Z0-9 ]+-----", lambda label: label[0].replace(" ", "\0"), value.strip())
    return labels.replace("@", "\n").replace(" ", "\n").replace("\0", " ") + "\n"


def _extensions(found: dict[str, str]) -> dict[str, str]:
    for name, value in found.items():
        if not (name.isascii() and name.isalpha()) or name == "auth":
            raise ValueError("an extension is named auth, or has characters other than ASCII letters: rename it")
        if not value.strip() or "," in value or not (value.isascii() and value.isprintable()):
            raise ValueError("the value of an extension is empty, or not plain ASCII without commas: correct it")
    return found


_Lines: Final = BeforeValidator(_unflattened)


class KafkaTls(Section):
    """TLS to the brokers. Certificates and keys are PEM: the path of a file, relative to this file, or the text itself.

    Files are reloaded when they change."""

    internal: ClassVar = frozenset(("keystore", "keystore_password", "min_version", "verify_certificate"))

    ca: Annotated[str, _Lines] = ""
    """Authorities to trust for the brokers' certificates, instead of the system's."""
    certificate: Annotated[str, _Lines] = ""
    """Client certificate with its chain."""
    key: Annotated[SecretStr, _Lines] = SecretStr("")
    """Private key of the certificate (PKCS#8)."""
    key_password: SecretStr = SecretStr("")
    """Password of the key, if it has one."""
    keystore: Path | None = None
    """PKCS#12 file with certificate and key, instead of `certificate` and `key`."""
    keystore_password: SecretStr = SecretStr("")
    """Password of the PKCS#12 file."""
    min_version: TlsVersion = "1.2"
    """Oldest TLS version that is accepted."""
    verify_host_name: bool = True
    """Whether the broker's certificate must be for the host name of the connection."""
    verify_certificate: bool = True
    """Whether a trusted authority must have signed the broker's certificate."""

    @model_validator(mode="after")
    def _complete(self) -> KafkaTls:
        key = bool(self.key.get_secret_value())
        if bool(self.certificate) != key:
            raise ValueError("needs certificate and key together: set both, or neither")
        if self.key_password.get_secret_value() and not key:
            raise ValueError("key_password is set without key: set key")
        if self.keystore and key:
            raise ValueError("has both ssl.keystore.location and a certificate: keep one of them")
        if bool(self.keystore) != bool(self.keystore_password.get_secret_value()):
            raise ValueError("needs ssl.keystore.location and ssl.keystore.password together: set both, or neither")
        return self


class KafkaOAuth(Section):
    """A token for each connection, fetched with client credentials (RFC 6749, 4.4; KIP-768)."""

    internal: ClassVar = frozenset(("extensions",))

    token_url: Annotated[Url, AfterValidator(encrypted)]
    """Token endpoint of the authorization server; `https`, or loopback."""
    client_id: Annotated[str, Field(min_length=1)]
    """Client id at that server."""
    client_secret: SecretStr
    """Client secret."""
    scopes: list[str] = Field(default=[])
    """Scopes to request; empty for the server's default."""
    extensions: Annotated[dict[str, str], AfterValidator(_extensions)] = Field(default_factory=dict)
    """SASL extensions by name, which some services require (KIP-342)."""
    ca: Annotated[str, _Lines] = ""
    """Authorities to trust for the token server's certificate, as path or PEM text, instead of the system's."""


class KafkaSasl(Section):
    """The login."""

    mechanism: Annotated[Mechanism, BeforeValidator(_mechanism)]
    """Kafka's `sasl.mechanism`; upper and lower case are the same."""
    username: str = ""
    """User, for PLAIN and SCRAM."""
    password: SecretStr = SecretStr("")
    """Password, for PLAIN and SCRAM."""
    oauth: KafkaOAuth | None = None
    """Token server, for OAUTHBEARER."""

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, values: Any) -> Any:
        return with_jaas(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _complete(self) -> KafkaSasl:
        login = bool(self.username), bool(self.password.get_secret_value())
        if self.mechanism == "OAUTHBEARER":
            if not self.oauth or not self.oauth.client_secret.get_secret_value():
                raise ValueError(
                    "OAUTHBEARER needs oauth: set oauth.token_url, client_id and a client_secret with text"
                )
            if any(login):
                raise ValueError("has username or password, which OAUTHBEARER does not use: remove them")
        elif self.oauth:
            raise ValueError(f"has oauth, which {self.mechanism} does not use: remove it, or set OAUTHBEARER")
        elif not all(login):
            names = ("username", "password")
            missing = " and ".join(name for name, is_set in zip(names, login, strict=True) if not is_set)
            raise ValueError(f"mechanism {self.mechanism} needs {missing}, which is missing or empty: set it")
        return self


class KafkaSecurity(Section):
    """How clients protect their connections to Kafka, and how they log in."""

    protocol: Annotated[Protocol, BeforeValidator(lambda value: str(value).lower())] | None = None
    """Kafka's `security.protocol`. Default: `sasl_ssl` with a login, else `ssl` with `tls`, else `plaintext`.
    `sasl_plaintext` must be explicit: the network can read records and, with PLAIN, the password."""
    tls: KafkaTls | None = None
    """Certificates, and checks of the brokers' certificates."""
    sasl: KafkaSasl | None = None
    """The login."""
    _references: Mapping[KeyPath, str] = PrivateAttr(default_factory=dict)
    _folder: Path = PrivateAttr(default=Path())
    _in_use: KafkaSecurity | None = PrivateAttr(default=None)
    _after_refusal: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _consistent(self) -> KafkaSecurity:
        protocol = self.effective_protocol
        if self.sasl and not protocol.startswith("sasl_"):
            raise ValueError(f"has sasl, but protocol {protocol} has no login: set protocol: sasl_ssl, or remove sasl")
        if protocol.startswith("sasl_") and not self.sasl:
            raise ValueError(f"protocol {protocol} needs a login: set sasl.mechanism and its credentials")
        if self.tls and not protocol.endswith("ssl"):
            raise ValueError(f"has tls, but protocol {protocol} has no TLS: set sasl_ssl or ssl, or remove tls")
        return self

    @property
    def effective_protocol(self) -> Protocol:
        """Kafka's `security.protocol`, or its default."""
        if self.protocol:
            return self.protocol
        return "sasl_ssl" if self.sasl else "ssl" if self.tls else "plaintext"

    @property
    def files(self) -> list[Path]:
        """All files of certificates and secrets."""
        tls, oauth = self.tls or KafkaTls(), self.sasl.oauth if self.sasl else None
        texts = [tls.ca, tls.certificate, tls.key.get_secret_value(), oauth.ca if oauth else ""]
        found = [Path(text) for text in texts if text and not is_pem(text)]
        found += [tls.keystore] if tls.keystore else []
        return found + [self._folder / name for text in self._references.values() for name in files_in(text)]

    @property
    def in_use(self) -> KafkaSecurity:
        """The settings that clients use now: another object after each `use`."""
        return self._in_use or self

    @property
    def after_refusal(self) -> bool:
        """Whether brokers rejected the previous credentials, so that clients with those never connect again."""
        return self._after_refusal

    def use(self, current: KafkaSecurity, *, after_refusal: bool = False) -> None:
        """Let every client use reloaded credentials. Call from any thread."""
        self._in_use = current
        self._after_refusal = after_refusal

    def read_from(self, folder: Path, references: Mapping[KeyPath, str]) -> KafkaSecurity:
        """Return a copy with absolute paths, which can reload its secrets from the texts with references."""
        values = self.model_dump(exclude_unset=True)
        _replace_paths(values, lambda path, _: str(folder / path), "ca", "certificate", "key", "keystore")
        found = KafkaSecurity.model_validate(values)
        if references:
            found._references, found._folder = dict(references), folder
        return found

    def current(self) -> KafkaSecurity:
        """Return a copy with the present secrets, certificates and keys of its files, all as text.

        Raises:
            ReferenceProblem: A file of a reference cannot be read, or its content is not usable.
            FileProblem: A certificate, key or store cannot be read, or is not usable.
        """
        if not self.files:
            return self
        values = self.model_dump(exclude_unset=True)
        for path, text in self._references.items():
            section: Any = values
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = resolve(text, os.environ, self._folder, lambda _: None)
        _replace_paths(values, lambda path, at: _read_pem(str(self._folder / path), at), "ca", "certificate", "key")
        try:
            found = KafkaSecurity.model_validate(values)
            if found.tls and found.tls.keystore and (identity := identity_of(found.tls)):  # no client reads half a file
                own = dict(zip(("certificate", "key"), pem_of(identity), strict=True))
                values["tls"] |= {**own, "keystore": None, "keystore_password": ""}
                found = KafkaSecurity.model_validate(values)
        except ValidationError as cause:  # its text shows the values
            raise ReferenceProblem("; ".join(problem["msg"] for problem in cause.errors())) from None
        for problem in file_problems(found):
            raise problem
        return found


class FileProblem(ConfigError):
    """A certificate, key or store is not usable."""

    def __init__(self, setting: str, sentence: str) -> None:
        super().__init__(f"kafka.security.{setting}: {sentence}")
        self.path: KeyPath = tuple(setting.split("."))
        self.sentence = sentence
        """The problem and its remedy, without a secret."""


def file_problems(security: KafkaSecurity) -> Iterator[FileProblem]:
    """Yield the problems with the files of a section with absolute paths (`read_from`)."""
    tls, oauth = security.tls or KafkaTls(), security.sasl.oauth if security.sasl else None
    for check in (
        lambda: read_authorities(tls.ca, "tls.ca"),
        lambda: identity_of(tls),
        lambda: read_authorities(oauth.ca if oauth else "", "sasl.oauth.ca"),
    ):
        try:
            check()
        except FileProblem as problem:
            yield problem


def located(security: KafkaSecurity, at: KeyPath, references: FileReferences) -> KafkaSecurity:
    """Return a section of a file with absolute paths, which can reload its secrets; report problems."""
    found = security.read_from(references.folder, references.below(at))
    for problem in file_problems(found):
        path = *at, *problem.path
        references.report(path, f"{references.name_of(path)}{problem.sentence}")
    tls = found.tls or KafkaTls()
    key = tls.key.get_secret_value()
    if key and not is_pem(key) and not tls.key_password.get_secret_value():
        references.check_mount(Path(key), (*at, "tls", "key"))
    return found


def warnings_of(security: KafkaSecurity, section: str = "kafka.security") -> list[str]:
    """Return the risks of a section's settings, and whether its certificate has expired; a sentence each."""
    found, tls, sasl = [], security.tls or KafkaTls(), security.sasl
    if not tls.verify_certificate:
        found.append("tls.verify_certificate is false, so any server can pose as a broker and read logins and records")
    elif not tls.verify_host_name:
        found.append("tls.verify_host_name is false, so any server with a trusted certificate can pose as a broker")
    if sasl and security.effective_protocol == "sasl_plaintext":
        also = {"PLAIN": " and the password", "OAUTHBEARER": " and the token"}.get(sasl.mechanism, "")
        found.append(f"protocol is sasl_plaintext, so the network can read the records{also}: use sasl_ssl")
    if (identity := identity_of(tls)) and identity.cert:
        certificate = identity.cert.certificate
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begin <= dt.datetime.now(dt.UTC) <= end:
            name = "tls.keystore" if tls.keystore else "tls.certificate"
            found.append(f"{name} is valid from {begin} to {end}, so brokers reject it: renew it; no restart is needed")
    return [f"{section}.{sentence}" for sentence in found]


def _content(value: str, setting: str) -> bytes:
    if is_pem(value):
        return value.encode()
    if not is_file(Path(value)):  # it may be a secret, so it is not shown
        raise FileProblem(setting, "is neither PEM text nor the path of a file: correct the path")
    try:
        return Path(value).read_bytes()
    except OSError as cause:
        raise FileProblem(setting, f"names {value}, which cannot be read: {cause.strerror}. Correct it") from None


def _read_pem(path: str, setting: str) -> str:
    text = _content(path, setting).decode(errors="replace")
    if not is_pem(text):
        raise FileProblem(setting, "names a file without PEM content: write the file again")
    return text


def read_authorities(value: str, setting: str) -> str:
    """Return certificates of authorities as PEM text; empty if none are set.

    Raises:
        FileProblem: They are not usable.
    """
    text = _content(value, setting).decode("ascii", "ignore") if value else ""
    try:
        if value:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        name, text = shlex.quote(value), "holds no certificates in PEM: correct it"
        if not is_pem(value):
            text += f". To convert a store, run: keytool -list -rfc -keystore {name} > {name}.pem"
        raise FileProblem(setting, text) from None
    return text


def identity_of(tls: KafkaTls) -> PKCS12KeyAndCertificates | None:
    """Return key, certificate and chain as their files are now; None if none are set.

    Raises:
        FileProblem: They are not usable, or do not belong together.
    """
    if tls.keystore:
        return _store(tls.keystore, tls.keystore_password.get_secret_value())
    if not tls.certificate:
        return None
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as coding
    from cryptography.hazmat.primitives.serialization import pkcs12

    try:
        certificates = x509.load_pem_x509_certificates(_content(tls.certificate, "tls.certificate"))
    except ValueError:
        text = "holds no certificate in PEM: correct it, or set ssl.keystore.location to a PKCS#12 file"
        raise FileProblem("tls.certificate", text) from None
    content, password = _content(tls.key.get_secret_value(), "tls.key"), tls.key_password.get_secret_value()
    encrypted = b"ENCRYPTED" in content
    if encrypted != bool(password):
        text = "is encrypted: set key_password" if encrypted else "is not encrypted: remove key_password"
        raise FileProblem("tls.key", text)
    try:
        key = coding.load_pem_private_key(content, password.encode() or None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        text = "cannot be opened with key_password" if encrypted else "holds no private key in PEM"
        raise FileProblem("tls.key", f"{text}: correct it") from None
    form = coding.Encoding.DER, coding.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != certificates[0].public_key().public_bytes(*form):
        raise FileProblem("tls.key", "does not match the first certificate in tls.certificate: set both from one pair")
    first, *chain = (pkcs12.PKCS12Certificate(each, None) for each in certificates)
    return pkcs12.PKCS12KeyAndCertificates(key, first, chain)


def _store(file: Path, password: str) -> PKCS12KeyAndCertificates:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import pkcs12

    content, name = _content(str(file), "tls.keystore"), shlex.quote(str(file))
    text = f"cannot open {file} as PKCS#12 with its password: correct one of them"
    if content.startswith(_JKS):
        text = f"names {file}, a JKS store. To convert it, run: keytool -importkeystore -deststoretype PKCS12"
        text += f" -srckeystore {name} -destkeystore {name}.p12"
    elif is_pem(content.decode("ascii", "ignore")):
        text = f"names {file}, which is PEM: set certificate and key to it instead"
    try:
        store = pkcs12.load_pkcs12(content, password.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise FileProblem("tls.keystore", text) from None
    if not (store.key and store.cert):
        raise FileProblem("tls.keystore", f"names {file}, which has no key with its certificate: use another file")
    return store


def pem_of(identity: PKCS12KeyAndCertificates) -> tuple[str, str]:
    """Return the certificate with its chain, and the key without a password; Java 17 reads few encrypted keys."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    assert identity.key
    own = [each.certificate for each in (identity.cert, *identity.additional_certs) if each]
    key = identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return "".join(each.public_bytes(Encoding.PEM).decode() for each in own), key.decode()


def _replace_paths(values: dict[str, Any], change: Callable[[str, str], str], *names: str) -> None:
    """Change the paths of certificates and keys by setting; text stays."""
    sections = {"tls": values.get("tls"), "sasl.oauth": (values.get("sasl") or {}).get("oauth")}
    for setting, section in sections.items():
        for name in names:
            if section and (value := section.get(name)):
                text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
                section[name] = text if is_pem(text) else change(text, f"{setting}.{name}")
