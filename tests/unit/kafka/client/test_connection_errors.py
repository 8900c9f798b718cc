"""The client's texts become one sentence with cause and fix, without a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import KafkaError

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client.connection_errors import ConnectionErrors, plain_reason

SECRET = "canary-of-the-secret"
OAUTH = {"token_url": f"https://t/token?key={SECRET}", "client_id": "app", "client_secret": SECRET}
LOGIN = {"sasl": {"mechanism": "SCRAM-SHA-512", "username": "app", "password": SECRET}}
TOKENS = {"sasl": {"mechanism": "OAUTHBEARER", "oauth": OAUTH}}
CERTIFICATE = {"tls": {"certificate": "c.pem", "key": "k.pem"}}
SECURITY: dict[str, dict[str, Any]] = {"login": LOGIN, "tokens": TOKENS, "certificate": CERTIFICATE, "others": {}}
TEXTS = yaml.safe_load(Path(__file__).with_name("connection_errors.yaml").read_text())
TOKEN = "Failed to acquire SASL OAUTHBEARER token: "
ALERT = "ssl://k:1/bootstrap: Receive failed: error:0A000412:SSL routines::ssl/tls alert: SSL alert number "
SASL = "sasl_ssl://k:1/bootstrap: SASL authentication error: "


def error(name: str, text: str) -> KafkaError:
    """Return an error of the client."""
    return KafkaError(getattr(KafkaError, name), text)


def kafka(security: dict[str, Any]) -> KafkaConfig:
    """Return the settings of a cluster."""
    return KafkaConfig.model_validate({"bootstrap_servers": "k:1", "security": security})


@pytest.mark.parametrize(("name", "text", "reason"), TEXTS["network"])
def test_reasons_of_the_network_need_no_fix(name: str, text: str, reason: str) -> None:
    """Refused, unknown host, timed out and closed read differently; the address has no protocol."""
    found = plain_reason(error(name, text), kafka({}))
    assert (str(found) if found else "") == reason
    assert not found or not found.refused


@pytest.mark.parametrize(("login", "row"), [(login, row) for login in SECURITY for row in TEXTS[login]])
def test_every_text_of_tls_and_login_has_a_sentence(login: str, row: list[str]) -> None:
    """It names the broker or the token server, what to change, and no secret."""
    name, text, problem, *details = row
    start, _, rest = text.replace("SECRET", SECRET).partition(" ")
    begins = {"TOKEN": TOKEN, "ALERT": ALERT, "SASL": SASL}.get(start, f"{start} ")
    found = plain_reason(error(name, begins + rest), kafka(SECURITY[login]))
    assert found
    assert (found.name, found.refused) == (problem, problem != "other kind")
    assert ("https://t/token" if start == "TOKEN" else "k:1") in str(found)
    assert "kafka." in found.fix or "clock" in found.fix
    assert [detail for detail in details if detail not in str(found)] == []
    assert not [sign for sign in ("{", "}", SECRET, "SSL routines", "after") if sign in str(found)]


@pytest.mark.parametrize(("security", "protocol"), [({}, "plaintext"), (CERTIFICATE, "ssl")])
def test_a_cluster_that_closes_connections_may_want_another_protocol(security: dict[str, Any], protocol: str) -> None:
    """The client says nothing more of it while no broker has answered; it is a guess, so retries go on."""
    errors = ConnectionErrors(kafka(security))
    errors.take(error("_ALL_BROKERS_DOWN", "1/1 brokers are down"))
    assert (found := errors.last())
    assert (found.name, found.refused) == ("other kind", False)
    assert "k:1 closed the connection, as a listener with another protocol does" in str(found)
    assert f"kafka.security, whose protocol is {protocol} now" in str(found)


@pytest.mark.parametrize("security", [{}, LOGIN, CERTIFICATE])
def test_a_cluster_that_has_answered_is_not_told_to_change_its_security(security: dict[str, Any]) -> None:
    """A broker that stops closes connections, too."""
    closed = "ssl://k:1/1: SSL handshake failed: closed by peer: connecting to a PLAINTEXT broker listener?"
    errors = ConnectionErrors(kafka(security))
    errors.clear()
    errors.take(error("_ALL_BROKERS_DOWN", "1/1 brokers are down"))
    assert errors.last() is None
    errors.take(error("_TRANSPORT", closed))
    assert str(errors.last()) == "connection closed by k:1"
