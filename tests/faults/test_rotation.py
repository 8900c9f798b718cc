"""Certificates and secrets change on disk under load: nothing is lost or repeated, and no caller gets an error."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from headrace.devcluster import HeadraceProcess
from headrace.devcluster.certificates import Authority
from headrace.devcluster.security import ClusterSecurity, allowed
from headrace.devcluster.token_server import TokenServer
from headrace.testing import RecordingBackend
from headrace.testing.secured import SecuredCluster
from tests.faults.conftest import Ledger, Poster, wait_until

LIMIT_SECONDS = 150
CLIENTS = 8
"""Of one process: each gets its own tokens."""
IN_USE = "changed files are in use"
REFUSED = "changed files are tried again, and the old stay in use"
REPLACED = (
    "push consumer: its client is being replaced",
    '"producer: its client was replaced',
    "inner_producer: its client was replaced",
)


class Mount:
    """A folder of secrets as Kubernetes mounts it: links that lead through one link, which is replaced at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, bytes] = {}

    def put(self, **files: str | bytes | Path) -> None:
        """Replace files by others; a name's underscore is the point before its suffix."""
        for name, content in files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            self._files[name.replace("_", ".")] = data if isinstance(data, bytes) else data.encode()
        version = self.folder / f"..{uuid.uuid4().hex}"
        version.mkdir(parents=True)
        for name, data in self._files.items():
            (version / name).write_bytes(data)
            (version / name).chmod(0o600)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        (self.folder / "..new").symlink_to(version.name)
        (self.folder / "..new").replace(self.folder / "..data")


class Operator:
    """Changes users and rights of a cluster."""

    def __init__(self, secured: SecuredCluster) -> None:
        self._secured = secured
        self._admin = AdminClient({"bootstrap.servers": secured.cluster.bootstrap_servers, "log_level": 0})
        self._authority = Authority(secured.security.folder, "ca")

    def _rights(self, user: str) -> list[Any]:
        names = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
        rights = [allowed(user, kind, "*", AclOperation.ALL) for kind in names]
        return [*rights, allowed(user, ResourceType.BROKER, "kafka-cluster", AclOperation.IDEMPOTENT_WRITE)]

    def certificate(self, user: str) -> dict[str, Path]:
        """Return a new certificate and its key, of a user with every right that is needed."""
        for granted in self._admin.create_acls(self._rights(user)).values():
            granted.result(30)
        files = self._authority.issue(user)
        return {"client_pem": files.certificate, "client_key": files.key}

    def deny(self, user: str) -> None:
        """Take every right from a user."""
        of_user: Any = (f"User:{user}", None, AclOperation.ANY, AclPermissionType.ANY)
        any_name: Any = None
        every = AclBindingFilter(ResourceType.ANY, any_name, ResourcePatternType.ANY, *of_user)
        for removed in self._admin.delete_acls([every]).values():
            assert removed.result(30)

    def password(self, user: str, password: str) -> None:
        """Set a password of SCRAM, and give the user every right that is needed."""
        change = UserScramCredentialUpsertion(
            user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), password.encode()
        )
        for changed in self._admin.alter_user_scram_credentials([change]).values():
            changed.result(30)
        for granted in self._admin.create_acls(self._rights(user)).values():
            granted.result(30)


class World:
    """A producer over HTTP and a push consumer on a secured cluster, whose files an operator changes."""

    def __init__(self, secured: SecuredCluster, start: Callable[..., Any], backend: RecordingBackend, folder: Path):
        self.name = f"rotate-{uuid.uuid4().hex[:8]}"
        self.secured, self.backend = secured, backend
        self.operator, self.mount = Operator(secured), Mount(folder / "mount")
        self.ledger = Ledger(secured.cluster.bootstrap_servers)
        self._start = start
        secured.cluster.create_topic(self.name, 3)
        self.mount.put(ca_pem=secured.security.authority)

    def file(self, name: str) -> str:
        return str(self.mount.folder / name)

    def scram(self) -> dict[str, Any]:
        """Return the section of a login with the mount's password."""
        login = {"mechanism": "SCRAM-SHA-512", "username": self.name, "password": f"${{file:{self.file('password')}}}"}
        security = {"tls": {"ca": self.file("ca.pem")}, "sasl": login}
        return {"bootstrap_servers": self.secured.cluster.sasl_servers, "security": security}

    def tls(self) -> dict[str, Any]:
        """Return the section of the mount's certificate."""
        tls = {"ca": self.file("ca.pem"), "certificate": self.file("client.pem"), "key": self.file("client.key")}
        return {"bootstrap_servers": self.secured.cluster.tls_servers, "security": {"tls": tls}}

    def oauth(self, tokens: TokenServer) -> dict[str, Any]:
        """Return the section of a login by tokens with the mount's secret."""
        secret = f"${{file:{self.file('secret')}}}"
        oauth = {"token_url": tokens.token_url, "client_id": "app", "client_secret": secret, "ca": self.file("ca.pem")}
        security = {"tls": {"ca": self.file("ca.pem")}, "sasl": {"mechanism": "OAUTHBEARER", "oauth": oauth}}
        return {"bootstrap_servers": self.secured.cluster.sasl_servers, "security": security}

    def start(self, kafka: dict[str, Any], **sections: Any) -> HeadraceProcess:
        """Start a process that pushes what is produced to it."""
        consumer = {
            "topics": [self.name],
            "group": self.name,
            "value_format": "json",
            "auto_offset_reset": "earliest",
            "backend": {"url": self.backend.url},
        }
        process: HeadraceProcess = self._start({"kafka": kafka, "reactive_consumers": {"push": consumer}, **sections})
        return process

    def connect_again(self, process: HeadraceProcess) -> None:
        """Restart the broker, which closes every connection; then records are written and pushed."""
        self.secured.cluster.restart(1)
        wait_until(lambda: ready(process), LIMIT_SECONDS, "readiness")
        before = len(places(self.backend))
        with Poster(process.url, self.name) as poster:
            poster.wait_for_more(200)
        assert (poster.refused, poster.unknown) == ([], [])
        self.backend.wait_for(lambda seen: len(places(seen)) >= before + len(poster.acknowledged))

    def check(self, poster: Poster, most_repeats: int = 0) -> None:
        """Nothing was refused, lost, or repeated without a cause."""
        assert (poster.refused, poster.unknown) == ([], [])
        self.ledger.check_acknowledged(self.name, poster)
        wanted = len(poster.acknowledged)
        self.backend.wait_for(lambda seen: len(places(seen)) >= wanted)
        assert len(places(self.backend)) == wanted
        assert len(self.backend.accepted) - wanted <= most_repeats


def places(backend: RecordingBackend) -> set[tuple[int, int]]:
    return {(record["partition"], record["offset"]) for record in list(backend.accepted)}


def ready(process: HeadraceProcess) -> bool:
    try:
        with urllib.request.urlopen(f"{process.url}/health/readiness", timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def wait_logged(process: HeadraceProcess, text: str, times: int = 1) -> None:
    wait_until(lambda: process.output.count(text) >= times, LIMIT_SECONDS, text)


def wait_replaced(process: HeadraceProcess, times: int = 1) -> None:
    """Wait until changed files are in use by the producers and the consumer."""
    for line in (IN_USE, *REPLACED):
        wait_logged(process, line, times)


@pytest.fixture
def world(
    kafka_secured: SecuredCluster, headrace: Callable[..., Any], backend: RecordingBackend, tmp_path: Path
) -> World:
    return World(kafka_secured, headrace, backend, tmp_path)


def test_a_new_certificate_of_another_user_is_taken_up(world: World) -> None:
    """The old user loses every right as soon as the clients are replaced; the new one has them."""
    world.mount.put(**world.operator.certificate(f"{world.name}-old"))
    process = world.start(world.tls())
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(500)
        world.mount.put(**world.operator.certificate(f"{world.name}-new"))
        wait_replaced(process)
        world.operator.deny(f"{world.name}-old")
        poster.wait_for_more(1000)
    world.check(poster)


@pytest.mark.parametrize("first", ["broker", "file"])
def test_a_new_password_is_taken_up(world: World, first: str) -> None:
    """Whether the broker knows it before the file or after; then every connection is opened again."""
    world.operator.password(world.name, "old-password")
    world.mount.put(password="old-password")
    process = world.start(world.scram())
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(500)
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
def tokens(kafka_secured: SecuredCluster, tmp_path: Path) -> Iterator[Tokens]:
    tokens = Tokens(kafka_secured, tmp_path / "tokens")
    with tokens.server:
        yield tokens


def wait_for_tokens(tokens: Tokens, rounds: int, clients: int) -> None:
    """Wait until so many tokens of each client have ended."""
    wanted = tokens.given() + rounds * clients
    wait_until(lambda: tokens.given() >= wanted, LIMIT_SECONDS, "tokens")


@pytest.mark.long
def test_tokens_that_end_under_load_are_replaced(world: World, tokens: Tokens) -> None:
    """Every connection outlives several tokens: the broker takes a new one before the old one ends."""
    world.mount.put(secret="old-secret")
    process = world.start(world.oauth(tokens.server))
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(500)
        wait_for_tokens(tokens, rounds=4, clients=CLIENTS)
        poster.wait_for_more(500)
    world.check(poster)


@pytest.mark.long
def test_a_new_secret_is_taken_up_while_the_old_one_is_valid(world: World, tokens: Tokens) -> None:
    """The old one is revoked when the new one is in use, and every token of the old one ends under load."""
    world.mount.put(secret="old-secret")
    process = world.start(world.oauth(tokens.server))
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(500)
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
def test_a_secret_that_is_revoked_too_early_loses_nothing(world: World, tokens: Tokens) -> None:
    """Callers get errors when the last token has ended; the new secret in the file ends that."""
    world.mount.put(secret="old-secret")
    process = world.start(world.oauth(tokens.server))
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(500)
        tokens.take("new-secret")
        wait_until(lambda: not ready(process), LIMIT_SECONDS, "the end of the last token")
        world.mount.put(secret="new-secret")
        wait_logged(process, IN_USE)
        poster.wait_for_more(20)
        wait_replaced(process)
        poster.wait_for_more(500)
    world.ledger.check_acknowledged(world.name, poster)
    world.backend.wait_for(lambda _: not world.ledger.missing(world.name, places(world.backend)))


@pytest.fixture
def server_store(kafka_secured: SecuredCluster) -> Iterator[Path]:
    """The broker's certificate, which is there again after the test."""
    store = kafka_secured.security.server_store
    content = store.read_bytes()
    yield store
    store.write_bytes(content)
    kafka_secured.cluster.restart(1)


@pytest.mark.long
def test_a_new_authority_of_the_brokers_is_taken_up(world: World, server_store: Path, tmp_path: Path) -> None:
    """Both are trusted, then the brokers' certificate is replaced, then the old one is no longer trusted."""
    old, new = world.secured.security.authority, Authority(tmp_path, "new-ca")
    world.mount.put(**world.operator.certificate(world.name))
    process = world.start(world.tls())
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(300)
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
def test_a_rotation_while_the_broker_is_down_is_taken_up_when_it_answers(world: World) -> None:
    """The user that Kafka knows after the outage is another one, and the old one has no right."""
    world.mount.put(**world.operator.certificate(f"{world.name}-old"))
    new = world.operator.certificate(f"{world.name}-new")
    process = world.start(world.tls(), producer={"delivery_timeout_seconds": 55})
    with Poster(process.url, world.name) as poster:
        poster.wait_for_more(300)
        world.secured.cluster.kill(1)
        world.mount.put(**new)
        wait_logged(process, REFUSED)
        world.secured.cluster.restart(1)
        wait_replaced(process)
        world.operator.deny(f"{world.name}-old")
        poster.wait_for_more(500)
    assert poster.unknown == []
    world.ledger.check_acknowledged(world.name, poster)
    world.backend.wait_for(lambda _: not world.ledger.missing(world.name, places(world.backend)))
