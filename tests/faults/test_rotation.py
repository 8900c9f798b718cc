"""Certificates and secrets change on disk under load: nothing is lost or repeated, and no caller gets an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.devcluster.certificates import Authority
from headrace.devcluster.security import ClusterSecurity
from headrace.devcluster.token_server import TokenServer
from headrace.testing import RecordingBackend
from headrace.testing.secured import SecuredCluster
from tests.faults.ledger import Ledger, delivered_by
from tests.faults.rotation import IN_USE, REFUSED, Rotation, ready, wait_logged, wait_replaced

CLIENTS = 8
"""Of one process: each gets its own tokens."""


@pytest.fixture
def world(
    kafka_secured: SecuredCluster, headrace: Callable[..., Any], backend: RecordingBackend, tmp_path: Path
) -> Rotation:
    return Rotation(kafka_secured, headrace, backend, tmp_path)


@pytest.mark.parametrize(
    "member",
    [
        pytest.param({}, id="member"),
        pytest.param({"properties": {"group.instance.id": "one"}}, id="static", marks=pytest.mark.long),
        pytest.param({"properties": {"group.protocol": "consumer"}}, id="kip-848", marks=pytest.mark.long),
    ],
)
def test_a_new_certificate_of_another_user_is_taken_up(world: Rotation, member: dict[str, Any]) -> None:
    """The old user loses every right as soon as the clients are replaced; the new one has them."""
    world.mount.put(**world.operator.certificate(f"{world.name}-old"))
    with world.under_load(world.tls(), member=member) as (process, poster):
        world.mount.put(**world.operator.certificate(f"{world.name}-new"))
        wait_replaced(process)
        world.operator.deny(f"{world.name}-old")
        poster.wait_for_more(1000)
    world.check(poster)


@pytest.mark.long
@pytest.mark.parametrize("first", ["broker", "file"])
def test_a_new_password_is_taken_up(world: Rotation, first: str) -> None:
    """Whether the broker knows it before the file or after; then every connection is opened again."""
    world.operator.password(world.name, "old-password")
    world.mount.put(password="old-password")
    with world.under_load(world.scram()) as (process, poster):
        changes: list[Callable[[], None]] = [
            lambda: world.operator.password(world.name, "new-password"),
            lambda: world.mount.put(password="new-password\n"),
        ]
        for change in changes if first == "broker" else reversed(changes):
            change()
            if first == "file" and REFUSED not in process.output:
                wait_logged(process, REFUSED)
            poster.wait_for_more(300)
        wait_logged(process, IN_USE)
        poster.wait_for_more(300)
    assert "new-password" not in process.output
    assert process.output.count("is being replaced") == 0, "a new password needs no new client"
    world.check(poster)
    world.connect_again(process)


class Tokens:
    """A token server whose tokens end soon, and the secrets that it takes."""

    SECONDS = 15

    def __init__(self, secured: SecuredCluster, folder: Path) -> None:
        security = ClusterSecurity(folder / "secrets")
        shutil.copytree(secured.security.folder, security.folder)
        self._file = security.folder / "client-secrets.json"
        self.take("old-secret")
        self.server = TokenServer(folder / "server", security, token_seconds=self.SECONDS)

    def take(self, *secrets: str) -> None:
        """Take these, and no others, from now on."""
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({"app": secrets}))
        draft.replace(self._file)

    def given(self) -> int:
        return self.server.server.log.read_text().count("gave a token")


@pytest.fixture
def tokens(world: Rotation, kafka_secured: SecuredCluster, tmp_path: Path) -> Iterator[Tokens]:
    """A token server that takes the secret of the mount."""
    tokens = Tokens(kafka_secured, tmp_path / "tokens")
    world.mount.put(secret="old-secret")
    with tokens.server:
        yield tokens


def wait_for_tokens(tokens: Tokens, rounds: int, clients: int) -> None:
    """Wait until so many tokens of each client have ended."""
    wanted = tokens.given() + rounds * clients
    Ledger.wait_until(lambda: tokens.given() >= wanted, "tokens")


@pytest.mark.long
def test_tokens_that_end_under_load_are_replaced(world: Rotation, tokens: Tokens) -> None:
    """Every connection outlives several tokens: the broker takes a new one before the old one ends."""
    with world.under_load(world.oauth(tokens.server)) as (_, poster):
        wait_for_tokens(tokens, rounds=4, clients=CLIENTS)
        poster.wait_for_more(500)
    world.check(poster)


@pytest.mark.long
def test_a_new_secret_is_taken_up_while_the_old_one_is_valid(world: Rotation, tokens: Tokens) -> None:
    """The old one is revoked when the new one is in use, and every token of the old one ends under load."""
    with world.under_load(world.oauth(tokens.server)) as (process, poster):
        tokens.take("old-secret", "canary-secret")
        world.mount.put(secret="canary-secret")
        wait_replaced(process)
        tokens.take("canary-secret")
        wait_for_tokens(tokens, rounds=2, clients=CLIENTS)
        poster.wait_for_more(500)
    assert "canary" not in process.output
    world.check(poster)
    world.connect_again(process)


@pytest.mark.long
def test_a_secret_that_is_revoked_too_early_loses_nothing(world: Rotation, tokens: Tokens) -> None:
    """Callers get errors when the last token has ended; the new secret in the file ends that."""
    with world.under_load(world.oauth(tokens.server)) as (process, poster):
        tokens.take("new-secret")
        Ledger.wait_until(lambda: not ready(process), "the end of the last token")
        world.mount.put(secret="new-secret")
        wait_logged(process, IN_USE)
        poster.wait_for_more(20)
        wait_replaced(process)
        poster.wait_for_more(500)
    world.ledger.check_acknowledged(world.name, poster)
    world.backend.wait_for(lambda _: not world.ledger.missing(world.name, delivered_by(world.backend)))


@pytest.fixture
def server_store(kafka_secured: SecuredCluster) -> Iterator[Path]:
    """The broker's certificate, which is there again after the test."""
    store = kafka_secured.security.server_store
    content = store.read_bytes()
    yield store
    store.write_bytes(content)
    kafka_secured.cluster.restart(1)


@pytest.mark.long
def test_a_new_authority_of_the_brokers_is_taken_up(world: Rotation, server_store: Path, tmp_path: Path) -> None:
    """Both are trusted, then the brokers' certificate is replaced, then the old one is no longer trusted."""
    old, new = world.secured.security.authority, Authority(tmp_path, "new-ca")
    world.mount.put(**world.operator.certificate(world.name))
    with world.under_load(world.tls()) as (process, poster):
        world.mount.put(ca_pem=old.read_bytes() + new.certificate.read_bytes())
        wait_replaced(process)
        poster.wait_for_more(300)
    world.check(poster)
    issued = new.issue("server", server=True)
    server_store.write_bytes(issued.key.read_bytes() + issued.certificate.read_bytes())
    world.connect_again(process)
    world.mount.put(ca_pem=new.certificate)
    wait_replaced(process, 2)
    world.connect_again(process)


@pytest.mark.long
def test_a_rotation_while_the_broker_is_down_is_taken_up_when_it_responses(world: Rotation) -> None:
    """The user that Kafka knows after the outage is another one, and the old one has no right."""
    world.mount.put(**world.operator.certificate(f"{world.name}-old"))
    new = world.operator.certificate(f"{world.name}-new")
    with world.under_load(world.tls(), producer={"properties": {"delivery.timeout.ms": 55_000}}) as (process, poster):
        world.secured.cluster.kill(1)
        world.mount.put(**new)
        wait_logged(process, REFUSED)
        world.secured.cluster.restart(1)
        wait_replaced(process)
        world.operator.deny(f"{world.name}-old")
        poster.wait_for_more(500)
    assert poster.told("unknown") == []
    world.ledger.check_acknowledged(world.name, poster)
    world.backend.wait_for(lambda _: not world.ledger.missing(world.name, delivered_by(world.backend)))
