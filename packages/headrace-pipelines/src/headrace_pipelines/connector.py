"""TLS and login of Spark's Kafka connector: the only file with the names of Java's Kafka client.

Spark sees references (`${file:secrets.properties:NAME}`), so no plan, log or checkpoint holds a secret. Kafka's client
replaces them when it is created. Source: KIP-297, `FileConfigProvider`.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import SecretStr

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.kafka_security import (
    KafkaOAuth,
    KafkaSasl,
    KafkaSecurity,
    KafkaTls,
    identity_of,
    pem_of,
    read_authorities,
)
from headrace.config.section import Section
from headrace.errors import ConfigError
from headrace.kafka.client.access import Right, missing_right
from headrace.kafka.client.connection_errors import refused_by_java
from headrace_pipelines.graph import topics_written
from headrace_pipelines.secrets_file import REGISTRY, SECRETS_FILE, with_secrets
from headrace_pipelines.spec import PipelineSpec

_MODULES: Final = "org.apache.kafka.common.security"
_PROVIDER: Final = "org.apache.kafka.common.config.provider.FileConfigProvider"
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_REFUSED_TOPICS: Final = re.compile(r"access topics: \[([^\]]+)\]")
_REFUSED_GROUP: Final = re.compile(r"access group: (\S+)")
_in_memory: dict[Path, int] = {}
"""Folder to the descriptor of its secrets."""


class ConnectorSecurity(NamedTuple):
    """TLS and login as the connector takes them."""

    options: dict[str, str]
    """Options of every source and sink; those with a secret hold a reference."""
    secrets: dict[str, str]
    """Content of the secrets file: name to value."""
    values: frozenset[str]
    """The secrets as they are configured."""


def with_registry(security: ConnectorSecurity, registry: SchemaRegistryConfig) -> ConnectorSecurity:
    """Add the access to the schema registry for Python workers of Spark; its settings are one secret."""
    secrets = {**security.secrets, REGISTRY: with_secrets(registry)}
    return security._replace(secrets=secrets, values=security.values.union(_secret_values(registry)))


def connector_options(security: KafkaSecurity) -> ConnectorSecurity:
    """Return the connector's options and the secrets that they refer to, read from the files as they are now.

    Raises:
        ConfigError: A certificate, a key or a PKCS#12 file cannot be read.
    """
    protocol = security.effective_protocol
    plain = {} if protocol == "plaintext" else {"security.protocol": protocol.upper()}
    secrets: dict[str, str] = {}
    if protocol.endswith("ssl"):
        tls = security.tls or KafkaTls()
        versions = [version for version in ("1.2", "1.3") if tls.min_version <= version]
        plain |= {
            "ssl.enabled.protocols": ",".join(f"TLSv{version}" for version in versions),
            "ssl.protocol": "TLSv1.3",
            "ssl.endpoint.identification.algorithm": "https" if tls.verify_host_name else "",
        }
        if tls.ca:
            plain["ssl.truststore.type"] = "PEM"
            secrets["ssl.truststore.certificates"] = _authorities(tls.ca, "tls.ca")
        if tls.certificate or tls.keystore:
            plain["ssl.keystore.type"] = "PEM"
            secrets["ssl.keystore.certificate.chain"], secrets["ssl.keystore.key"] = _identity(tls)
    if security.sasl:
        plain["sasl.mechanism"] = security.sasl.mechanism
        secrets["sasl.jaas.config"] = _login(security.sasl)
        if security.sasl.oauth:
            plain["sasl.oauthbearer.token.endpoint.url"] = security.sasl.oauth.token_url
            plain["sasl.login.callback.handler.class"] = f"{_MODULES}.oauthbearer.OAuthBearerLoginCallbackHandler"
    referring = {name: f"${{file:{SECRETS_FILE}:{name}}}" for name in secrets}
    provider = {"config.providers": "file", "config.providers.file.class": _PROVIDER} if secrets else {}
    options = {f"kafka.{name}": value for name, value in {**plain, **provider, **referring}.items()}
    return ConnectorSecurity(options, secrets, frozenset(_secret_values(security)))


def for_server(security: ConnectorSecurity, folder: Path) -> ConnectorSecurity:
    """Return the same for a process with another working folder, which reads the secrets file by its whole path."""
    here, there = f"${{file:{SECRETS_FILE}:", f"${{file:{folder / SECRETS_FILE}:"
    return security._replace(options={name: value.replace(here, there) for name, value in security.options.items()})


def write_secrets(
    folder: Path, secrets: Mapping[str, str], *, shared: bool = False, keeps_others: bool = False
) -> None:
    """Replace the secrets file of a folder, readable by its owner only; without secrets, remove it.

    On Linux the file is a link to memory of this process, so nothing is left when this process is killed. A file that
    is `shared` with other machines is a plain one. With `keeps_others`, the file of another living process stays.
    """
    file = folder / SECRETS_FILE
    if keeps_others and not shared and folder not in _in_memory and file.exists():
        return
    before = _in_memory.pop(folder, None)
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    if not secrets:
        file.unlink(missing_ok=True)
    else:
        if sys.platform == "linux" and not shared:
            target = _in_memory[folder] = os.memfd_create(SECRETS_FILE)
            os.fchmod(target, 0o600)
            draft.symlink_to(f"/proc/{os.getpid()}/fd/{target}")
        else:
            target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(target, "w", encoding="ascii", closefd=folder not in _in_memory) as stream:
            for name, value in secrets.items():  # every character in a form that Java's `Properties.load` reads
                escaped = re.sub("....", r"\\u\g<0>", value.encode("utf-16-be").hex())
                stream.write(f"{name}={escaped}\n")
        draft.replace(file)
    if before is not None:
        os.close(before)


def refusal(reported: str, kafka: KafkaConfig, spec: PipelineSpec) -> str:
    """Return why Kafka rejected the connector of a pipeline, from one line with what Java's exceptions report."""
    if "AuthorizationException" not in reported:
        of_a_token = "LoginException" in reported or "token endpoint" in reported
        return str(refused_by_java(f"token: {reported}" if of_a_token else reported, kafka))
    if "ClusterAuthorization" in reported:
        return missing_right("cluster", kafka, [Right("IdempotentWrite", "cluster")])
    if found := _REFUSED_GROUP.search(reported):
        return missing_right("group", kafka, [Right("Read", "group", found[1])])
    found = _REFUSED_TOPICS.search(reported)
    refused = found[1].split(", ") if found else []
    needed = [Right("Read", "topic", topic) for source in spec.sources.values() for topic in source.topics]
    needed += [Right("Write", "topic", topic) for topic in topics_written(spec)]
    missing = [right for right in dict.fromkeys(needed) if not refused or right.name in refused]
    return missing_right("topic", kafka, missing)


def _login(sasl: KafkaSasl) -> str:
    if sasl.oauth:
        return _jaas("oauthbearer.OAuthBearerLoginModule", _token_options(sasl.oauth))
    module = "plain.PlainLoginModule" if sasl.mechanism == "PLAIN" else "scram.ScramLoginModule"
    return _jaas(module, {"username": sasl.username, "password": sasl.password.get_secret_value()})


def _token_options(oauth: KafkaOAuth) -> dict[str, str]:
    options = {
        "clientId": oauth.client_id,
        "clientSecret": oauth.client_secret.get_secret_value(),
        **({"scope": " ".join(oauth.scopes)} if oauth.scopes else {}),
        **{f"extension_{name}": value for name, value in oauth.extensions.items()},
    }
    if oauth.ca:
        authorities = _authorities(oauth.ca, "sasl.oauth.ca")
        options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authorities}
    return options


def _jaas(module: str, options: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r"})
    written = " ".join(f'{name}="{value.translate(escapes)}"' for name, value in options.items())
    return f"{_MODULES}.{module} required {written};"


def _authorities(value: str, setting: str) -> str:
    return "\n".join(dict.fromkeys(_CERTIFICATE.findall(read_authorities(value, setting))))


def _identity(tls: KafkaTls) -> tuple[str, str]:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    identity = identity_of(tls)
    if not identity or not isinstance(identity.key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"kafka.security.tls.{'keystore' if tls.keystore else 'key'} is not an RSA or EC key, which Java's Kafka "
            "client needs: use another"
        )
    return pem_of(identity)


def _secret_values(section: Section) -> list[str]:
    secrets = [value.get_secret_value() for _, value in section if isinstance(value, SecretStr)]
    below = [secret for _, value in section if isinstance(value, Section) for secret in _secret_values(value)]
    return [*filter(None, secrets), *below]
