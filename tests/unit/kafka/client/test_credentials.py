"""Files of `kafka.security` that change: what is tried, what is taken up, and what becomes of living clients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.references import FileChanges
from headrace.config.yaml_tree import KeyPath
from headrace.errors import KafkaUnavailable
from headrace.kafka.client.credentials import ClientSecurity, SecurityFiles
from headrace.kafka.client.properties import client_properties
from headrace_devkit.devcluster.certificates import STORE_PASSWORD, Authority
from headrace_devkit.testing import ManualClock


class Client:
    """A client that keeps the login it is given; like an administrative one, it has a length of 0."""

    def __init__(self) -> None:
        self.logins: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return 0

    def set_sasl_credentials(self, username: str, password: str) -> None:
        self.logins.append((username, password))


class Harness:
    """Files, a process that looks at them, and brokers that accept what `accepts` says."""

    def __init__(self, folder: Path, **security: Any) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.accepts, self.attempts = True, 0
        references: dict[KeyPath, str] = {("sasl", "password"): "${file:password}"} if "sasl" in security else {}
        if references:
            self.write("password", "old")
            security["sasl"] = {"mechanism": "PLAIN", "password": "old", **security["sasl"]}
        self.security = KafkaSecurity.model_validate(security).read_from(folder, references)
        self.kafka = KafkaConfig(security=self.security)
        self.files = SecurityFiles(self.kafka, self.clock)
        self.client = Client()
        self.owner = ClientSecurity(self.security, Client)

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file at once."""
        (self.folder / "draft").write_bytes(content if isinstance(content, bytes) else content.encode())
        (self.folder / "draft").replace(self.folder / name)

    def look(self) -> bool:
        """Look at the files when it is time, and return whether they are in use now."""
        assert not self.files.due
        self.clock._now += FileChanges.LOOK_SECONDS
        assert self.files.due
        return self.files.look(self._attempt) is not None

    def _attempt(self, kafka: KafkaConfig) -> Client:
        self.attempts += 1
        confluent_kafka.Producer({**client_properties(kafka, "attempt"), "log_level": 0})
        if not self.accepts:
            raise KafkaUnavailable("login refused")
        return Client()


def certificates(folder: Path, authority: str = "ca") -> None:
    """Write the certificate and key of a client."""
    Authority(folder, authority).issue("client")


def tls_harness(folder: Path, *, store: bool = False) -> Harness:
    certificates(folder)
    if store:
        return Harness(folder, tls={"ca": "ca.pem", "keystore": "client.p12", "keystore_password": STORE_PASSWORD})
    return Harness(folder, tls={"ca": "ca.pem", "certificate": "client.pem", "key": "client.key"})


def test_a_password_that_a_broker_accepts_is_given_to_the_living_client(tmp_path: Path) -> None:
    """Nothing is tried while nothing changes, and the client is not replaced."""
    harness = Harness(tmp_path, sasl={"username": "app"})
    assert not harness.look()
    harness.write("password", "new\n")
    assert harness.look()
    assert harness.owner.replacement(harness.client) is None
    assert harness.client.logins == [("app", "new")]
    assert harness.owner.replacement(harness.client) is None
    assert not harness.look()
    assert (harness.attempts, harness.client.logins) == (1, [("app", "new")])


def test_what_is_refused_is_tried_again_and_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The broker may learn the password after the file; until then the old one stays in use."""
    harness = Harness(tmp_path, sasl={"username": "app"})
    harness.accepts = False
    harness.write("password", "canary-new")
    with caplog.at_level(logging.WARNING):
        assert not any(harness.look() for _ in range(3))
    assert harness.attempts == 3
    assert harness.owner.replacement(harness.client) is None
    assert harness.client.logins == []
    assert len(caplog.records) == 1
    assert "login refused" in caplog.text
    assert "canary" not in caplog.text
    harness.accepts = True
    assert harness.look()


@pytest.mark.parametrize("names", [("client.pem", "client.key"), ("client.p12",)])
def test_files_that_are_not_whole_yet_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    """They are written one after the other, in parts. A new client has what was read before."""
    harness = tls_harness(tmp_path, store=len(names) == 1)
    before = client_properties(harness.kafka, "x")
    (tmp_path / "next").mkdir()
    certificates(tmp_path / "next")
    contents = [(name, (tmp_path / "next" / name).read_bytes()) for name in names]
    *parts, last = [(name, content[:size]) for name, content in contents for size in (10, 0, 200, len(content))]
    for name, part in parts:
        harness.write(name, part)
        assert not harness.look()
        assert client_properties(harness.kafka, "x") == before
    assert len(caplog.records) == len(parts), "a warning for each state of the files"
    assert harness.owner.replacement(harness.client) is None
    for is_new in (True, False):
        harness.write(*last)
        assert harness.look() is is_new
    assert harness.owner.replacement(harness.client) is not None
    assert harness.owner.replacement(harness.client) is None


def test_a_file_that_is_missing_or_empty_for_a_while_changes_nothing(tmp_path: Path) -> None:
    """A new client gets what was read before, and never the system's authorities; the same content is no change."""
    harness = tls_harness(tmp_path)
    before = (tmp_path / "ca.pem").read_text()
    (tmp_path / "ca.pem").unlink()
    assert not harness.look()
    assert client_properties(harness.kafka, "x")["ssl.ca.pem"] == before
    harness.write("ca.pem", "")
    assert not harness.look()
    assert client_properties(harness.kafka, "x")["ssl.ca.pem"] == before
    harness.write("ca.pem", before)
    assert not harness.look()
    assert harness.attempts == 0
    assert harness.owner.replacement(harness.client) is None


def test_a_client_that_cannot_be_made_leaves_the_old_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has a warning, and the owner continues."""
    harness = tls_harness(tmp_path)

    def fail() -> Client:
        raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._INVALID_ARG))

    owner = ClientSecurity(harness.security, fail)
    certificates(tmp_path)
    assert harness.look()
    assert owner.replacement(harness.client) is None
    assert "keeping the old credentials of a client" in caplog.text
