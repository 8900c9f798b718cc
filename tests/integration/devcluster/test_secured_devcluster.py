"""The secured dev cluster: every login that must work works, and every other one is refused with its cause."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from headrace_devkit.devcluster import DevCluster, broker_protocol

LIMIT_SECONDS = 30


def dev(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `headrace dev ...` in a folder."""
    command = [sys.executable, "-m", "headrace.cli.main", "dev", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


class Secured(NamedTuple):
    """A secured cluster with the topic `t`."""

    folder: Path
    endpoints: dict[str, Any]
    passwords: dict[str, str]

    @property
    def listeners(self) -> dict[str, Any]:
        """What the file with the addresses says of it."""
        found: dict[str, Any] = self.endpoints["secured"]
        return found

    def login(self, mechanism: str, user: str) -> dict[str, str]:
        """Return the settings of a client that logs in."""
        secret = {"sasl.username": user, "sasl.password": self.passwords[user]}
        if mechanism == "OAUTHBEARER":
            secret = {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.client.id": user,
                "sasl.oauthbearer.client.secret": self.passwords[user],
                "sasl.oauthbearer.token.endpoint.url": self.listeners["token_url"],
                "https.ca.location": self.listeners["authority"],
            }
        return {
            "bootstrap.servers": self.listeners["sasl_ssl"]["bootstrap_servers"],
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": self.listeners["authority"],
            "sasl.mechanism": mechanism,
            **secret,
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Start a secured cluster with a registry through the command line."""
    folder = tmp_path_factory.mktemp("secured")
    try:
        started = dev(folder, "up", "--secured", "--output", "json")
        assert started.returncode == 0, started.stderr
        endpoints = json.loads(started.stdout)
        broker_protocol.create_topic(endpoints["kafka"]["brokers"][0]["port"], "t", 1, 1, {})
        yield Secured(folder, endpoints, json.loads(Path(endpoints["secured"]["passwords"]).read_text()))
    finally:
        DevCluster(folder / ".headrace/dev").reset()


def result_of(settings: dict[str, str]) -> str:
    """Write a record; return `ok`, the error of the record, or the first error of the client."""
    results: list[str] = []
    producer = Producer({**settings, "log_level": 0, "error_cb": lambda error: results.append(error.str())})
    producer.produce("t", b"v", on_delivery=lambda error, _: results.append(error.str() if error else "ok"))
    end = time.monotonic() + LIMIT_SECONDS
    while not results and time.monotonic() < end:
        producer.poll(0.05)
    producer.purge()
    producer.flush()
    return results[0] if results else "nothing"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"])
def test_every_mechanism_logs_in(secured: Secured, mechanism: str) -> None:
    """The user with rights writes; the user without is known and refused."""
    assert result_of(secured.login(mechanism, "app")) == "ok"
    assert result_of(secured.login(mechanism, "guest")) == "Broker: Topic authorization failed"


def test_the_registry_wants_tls_and_a_login(secured: Secured) -> None:
    """With the password it answers as without the front; with another it refuses."""
    context = ssl.create_default_context(cafile=secured.listeners["authority"])

    def ask(password: str) -> int:
        login = base64.b64encode(f"app:{password}".encode()).decode()
        url = secured.listeners["schema_registry"]["url"] + "/subjects/s/versions"
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, b'{"schema": "\\"long\\""}', headers)
        try:
            with urllib.request.urlopen(request, context=context, timeout=LIMIT_SECONDS) as response:
                return int(response.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    assert ask(secured.passwords["app"]) == 200
    assert ask("wrong") == 401


def test_secrets_are_private_and_stay_until_the_reset(secured: Secured) -> None:
    """Keys and passwords are readable by their owner only; a second start keeps passwords and users."""
    modes = secured.listeners["modes"]
    assert {mode for name, mode in modes.items() if name.endswith((".key", ".p12", "passwords.json"))} == {"0o600"}
    assert not [text for text in secured.passwords.values() if text in json.dumps(secured.endpoints)]
    other = dev(secured.folder, "up", "--no-secured")
    assert other.returncode == 1
    assert "is secured. Continue without that option" in other.stderr
    assert dev(secured.folder, "down").stderr == "stopped\n"
    assert dev(secured.folder, "up").returncode == 0
    assert json.loads(Path(secured.listeners["passwords"]).read_text()) == secured.passwords
    assert result_of(secured.login("SCRAM-SHA-256", "app")) == "ok"
