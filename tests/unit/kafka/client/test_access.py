"""The sentence about a missing right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.kafka.client.access import principal_of
from headrace.kafka.client.connection_errors import refused_by_java
from headrace_devkit.devcluster.certificates import STORE_PASSWORD, Authority

LOGIN = {"sasl": {"mechanism": "PLAIN", "username": "ann", "password": "secret"}}


def kafka(**section: Any) -> KafkaConfig:
    """Return the configuration of a cluster."""
    return KafkaConfig.model_validate(section)


def test_the_principal_of_a_certificate_is_what_the_brokers_make_of_it(tmp_path: Path) -> None:
    """So its common name is named, from a file, from text and from a store; nothing if it cannot be read."""
    issued = Authority(tmp_path, "ca").issue("ann")
    text, key = issued.certificate.read_text(), str(issued.key)
    store = {"keystore": str(tmp_path / "ann.p12"), "keystore_password": STORE_PASSWORD}
    for tls in ({"certificate": str(issued.certificate), "key": key}, {"certificate": text, "key": key}, store):
        found = principal_of(kafka(security={"tls": tls}))
        assert found == ("the principal of certificate CN=ann", "PRINCIPAL")
    gone = {"certificate": str(tmp_path / "gone.pem"), "key": key}
    assert principal_of(kafka(security={"tls": gone}))[0] == "the principal of the client certificate"


def test_the_principal_of_a_login_or_a_token() -> None:
    """A login counts also with a client certificate; clients without share one; a token may have another name."""
    tls = {"certificate": "a.pem", "key": "a.key"}
    assert principal_of(kafka(security=LOGIN)) == principal_of(kafka(security={**LOGIN, "tls": tls}))
    assert principal_of(kafka(security=LOGIN))[0] == "User:ann"
    assert principal_of(kafka())[0] == "User:ANONYMOUS"
    oauth = {"token_url": "https://localhost/t", "client_id": "ann", "client_secret": "secret"}
    found = principal_of(kafka(security={"sasl": {"mechanism": "OAUTHBEARER", "oauth": oauth}}))
    assert found == ("the principal in the token of ann", "PRINCIPAL")


def test_the_principal_is_that_of_the_login_in_use() -> None:
    """A file may hold another user since the start; the sentence about a refused login names it too."""
    changed = kafka(security=LOGIN)
    changed.security.use(KafkaSecurity.model_validate({"sasl": {**LOGIN["sasl"], "username": "bob"}}))
    assert principal_of(changed)[0] == "User:bob"
    refused = refused_by_java("SaslAuthenticationException: invalid credentials", changed)
    assert "user bob or its password" in refused.why
