"""A secured cluster as tests use it: sections of headrace.yaml for each login, and access rules."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from headrace.config.kafka import KafkaConfig
from headrace.config.load import load_config
from headrace_devkit.devcluster import Cluster, HeadraceProcess
from headrace_devkit.devcluster.security import ClusterSecurity
from headrace_devkit.devcluster.token_server import TokenServer


def kafka_settings(bootstrap_servers: str, **settings: Any) -> KafkaConfig:
    """Return the settings of the product's clients in this process: with a login, where processes need one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "headrace.yaml")
        file.write_text(json.dumps({"kafka": kafka_section(bootstrap_servers)}))
        return load_config(file, {}).kafka.model_copy(update=settings)


def kafka_section(bootstrap_servers: str) -> dict[str, Any]:
    """Return the section `kafka` of a headrace.yaml for a cluster: with a login, where processes need one."""
    return {"bootstrap_servers": bootstrap_servers, **HeadraceProcess.logins.get(bootstrap_servers, {})}


def command_environment(bootstrap_servers: str, folder: Path) -> dict[str, str]:
    """Return the environment of commands in a folder; where they need a login, the folder gets a file with it."""
    file = folder / "headrace.yaml"
    if bootstrap_servers in HeadraceProcess.logins and not file.exists():
        file.write_text(json.dumps({"kafka": kafka_section(bootstrap_servers)}))
    return {**os.environ, "KAFKA": bootstrap_servers, "PWD": str(folder)}


class SecuredCluster(NamedTuple):
    """Brokers with TLS, logins and access rules, and the server of their tokens."""

    cluster: Cluster
    """Its `bootstrap_servers` are the listener without login, which has every right."""
    security: ClusterSecurity
    """Users, passwords and certificates."""
    tokens: TokenServer
    """Gives tokens to the cluster's users."""

    @property
    def bootstrap_servers(self) -> str:
        """The listener without login, which has every right."""
        return self.cluster.bootstrap_servers

    def login(self, mechanism: str = "SCRAM-SHA-512", user: str = "app") -> dict[str, Any]:
        """Return the section `kafka` of a headrace.yaml that logs in over TLS."""
        password, authority = f"${{file:{self.security.folder / user}.password}}", str(self.security.authority)
        sasl: dict[str, Any] = {"mechanism": mechanism, "username": user, "password": password}
        if mechanism == "OAUTHBEARER":
            oauth = {"token_url": self.tokens.token_url, "client_id": user, "client_secret": password, "ca": authority}
            sasl = {"mechanism": mechanism, "oauth": oauth}
        return {"bootstrap_servers": self.cluster.sasl_servers, "security": {"tls": {"ca": authority}, "sasl": sasl}}

    def certificate(self, user: str = "app") -> dict[str, Any]:
        """Return the section `kafka` of a headrace.yaml that shows a certificate."""
        folder = self.security.folder
        pem = {"certificate": str(folder / f"{user}.pem"), "key": str(folder / f"{user}.key")}
        return {
            "bootstrap_servers": self.cluster.tls_servers,
            "security": {"tls": {"ca": str(self.security.authority), **pem}},
        }

    def set_password(self, user: str, password: str) -> None:
        """Set a user's password of SCRAM-SHA-512 on the brokers."""
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        change = UserScramCredentialUpsertion(user, scram, password.encode())
        admin = self.admin
        for changed in admin.alter_user_scram_credentials([change]).values():
            changed.result(60)

    def grant(self, *rights: AclBinding) -> None:
        """Give rights to users."""
        admin = self.admin
        for granted in admin.create_acls(list(rights)).values() if rights else ():
            granted.result(60)

    @property
    def admin(self) -> AdminClient:
        """A client with every right."""
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
