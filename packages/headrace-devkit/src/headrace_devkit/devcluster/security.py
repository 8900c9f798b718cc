"""Who may do what on a secured dev cluster: users and their secrets, the brokers' listeners, and the access rules."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)

from headrace.extras import not_installed
from headrace_devkit.devcluster.certificates import SERVER_NAME, STORE_PASSWORD, Authority, write_file

ADMIN: Final = "admin"
"""Has every right."""
APP: Final = "app"
"""May do everything with topics, groups and transactional ids, and write idempotently."""
GUEST: Final = "guest"
"""Has no right."""
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
ISSUER: Final = "headrace-dev"
AUDIENCE: Final = "kafka"
_USERS: Final = (ADMIN, APP, GUEST)
_ANY_NAME: Final = "*"
_LIMIT_SECONDS: Final = 30.0
_MODULES: Final = "org.apache.kafka.common.security"


class ClusterSecurity:
    """The secrets and certificates of a secured cluster, in a folder that only its owner can read."""

    def __init__(self, folder: Path) -> None:
        """Describe the folder; nothing is written before `prepare`."""
        self.folder = folder
        self.authority = folder / "ca.pem"
        """Certificate of the authority that clients must trust."""
        self.jwks = folder / "jwks.json"
        """Public keys of the token server (RFC 7517)."""

    @functools.cached_property
    def passwords(self) -> Mapping[str, str]:
        """Password of each user; also the secret of the OAuth client of this name."""
        found: dict[str, str] = json.loads((self.folder / "passwords.json").read_text())
        return found

    def client_secrets(self, user: str) -> list[str]:
        """Return what a user may get tokens with now: the password, unless `client-secrets.json` has others."""
        with contextlib.suppress(FileNotFoundError):
            others: dict[str, list[str]] = json.loads((self.folder / "client-secrets.json").read_text())
            if user in others:
                return others[user]
        return [self.passwords[user]] if user in self.passwords else []

    @property
    def server_store(self) -> Path:
        """PEM file with the key and the certificate of the servers."""
        return self.folder / "server.keystore.pem"

    def prepare(self) -> None:
        """Make what is missing: passwords, the token server's key, and certificates, which are new at each start."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.folder / "passwords.json").exists():
            made = {user: secrets.token_urlsafe(16) for user in _USERS}
            write_file(self.folder / "passwords.json", json.dumps(made).encode(), 0o600)
            try:
                from joserfc.jwk import RSAKey  # here, because pytest imports this module also without the extra
            except ImportError as cause:
                raise not_installed("a secured cluster", cause.name or "joserfc", "devcluster") from cause
            key = RSAKey.generate_key(2048, {"kid": "dev", "use": "sig", "alg": "RS256"})
            write_file(self.folder / "token.key", json.dumps(key.as_dict(private=True)).encode(), 0o600)
            write_file(self.jwks, json.dumps({"keys": [key.as_dict(private=False)]}).encode(), 0o644)
        for user, password in self.passwords.items():
            write_file(self.folder / f"{user}.password", password.encode(), 0o600)
        authority = Authority(self.folder, "ca")
        server = authority.issue("server", server=True)
        write_file(self.server_store, server.key.read_bytes() + server.certificate.read_bytes(), 0o600)
        for user in _USERS:
            authority.issue(user)
        authority.issue("expired", days=-1)
        Authority(self.folder, "other-ca").issue("stranger")

    def listeners(self, sasl_port: int, tls_port: int) -> dict[str, str]:
        """Return the settings of a broker with one listener for logins and one for client certificates."""
        sasl = "listener.name.sasl."
        plain = " ".join(f'user_{user}="{password}"' for user, password in self.passwords.items())
        login = {
            "plain": f"{_MODULES}.plain.PlainLoginModule required {plain};",
            "scram-sha-256": f"{_MODULES}.scram.ScramLoginModule required;",
            "scram-sha-512": f"{_MODULES}.scram.ScramLoginModule required;",
            "oauthbearer": f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required;",
        }
        return {
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_SSL,TLS:SSL",
            "listeners": f"SASL://127.0.0.1:{sasl_port},TLS://127.0.0.1:{tls_port}",
            "advertised.listeners": f"SASL://{SERVER_NAME}:{sasl_port},TLS://{SERVER_NAME}:{tls_port}",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.server_store),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority),
            "listener.name.tls.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/,DEFAULT",
            f"{sasl}sasl.enabled.mechanisms": ",".join(MECHANISMS),
            **{f"{sasl}{mechanism}.sasl.jaas.config": text for mechanism, text in login.items()},
            # Connections of tokens end with the token, unless their client logs in again.
            f"{sasl}oauthbearer.connections.max.reauth.ms": "3600000",
            f"{sasl}oauthbearer.sasl.server.callback.handler.class": (
                f"{_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            "sasl.oauthbearer.jwks.endpoint.url": self.jwks.as_uri(),
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # The listener without login is for the brokers and for this machine's operator.
            "super.users": f"User:ANONYMOUS;User:{ADMIN}",
            "allow.everyone.if.no.acl.found": "false",
        }

    def java_flags(self) -> list[str]:
        """Return the flags of the brokers' JVM."""
        return [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.jwks.as_uri()}"]

    def grant(self, bootstrap_servers: str) -> None:
        """Create the users' SCRAM credentials and the rights of `APP`, through the listener without login.

        Raises:
            KafkaException: Kafka refuses.
        """
        admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
        # A request may name a user only once.
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            changes: list[UserScramCredentialAlteration] = [
                UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
                for user, password in self.passwords.items()
            ]
            for changed in admin.alter_user_scram_credentials(changes).values():
                changed.result(_LIMIT_SECONDS)
        names = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
        rights = [allowed(APP, kind, _ANY_NAME, AclOperation.ALL) for kind in names]
        rights.append(allowed(APP, ResourceType.BROKER, "kafka-cluster", AclOperation.IDEMPOTENT_WRITE))
        for granted in admin.create_acls(rights).values():
            granted.result(_LIMIT_SECONDS)

    def document(self, sasl: str, tls: str) -> dict[str, Any]:
        """Return what `endpoints.json` says of the secured listeners: it names files, and holds no secret."""
        users = {
            user: {
                "certificate": str(self.folder / f"{user}.pem"),
                "key": str(self.folder / f"{user}.key"),
                "store": str(self.folder / f"{user}.p12"),
            }
            for user in (*_USERS, "expired", "stranger")
        }
        for user in _USERS:
            users[user]["password"] = str(self.folder / f"{user}.password")
        return {
            "sasl_ssl": {"bootstrap_servers": sasl, "mechanisms": list(MECHANISMS)},
            "ssl": {"bootstrap_servers": tls},
            "authority": str(self.authority),
            "passwords": str(self.folder / "passwords.json"),
            "store_password": STORE_PASSWORD,
            "users": users,
            "modes": {path.name: oct(path.stat().st_mode & 0o777) for path in sorted(self.folder.iterdir())},
        }


def allowed(user: str, kind: ResourceType, name: str, operation: AclOperation, *, prefix: bool = False) -> AclBinding:
    """Return the right of a user to do something from every host.

    Args:
        user: Name without `User:`.
        kind: What the name is of.
        name: Name of the resource; `*` is every one.
        operation: What the user may do.
        prefix: Whether the right is to all names that begin like this.
    """
    pattern = ResourcePatternType.PREFIXED if prefix else ResourcePatternType.LITERAL
    return AclBinding(kind, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
