"""A secured cluster whose users, certificates and secrets an operator changes, while processes have their files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace_devkit.devcluster import HeadraceProcess
from headrace_devkit.devcluster.certificates import Authority
from headrace_devkit.devcluster.security import allowed
from headrace_devkit.testing import RecordingBackend
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import send
from tests.faults.ledger import Ledger, Poster, delivered_by

IN_USE = "changed files are in use"
REFUSED = "the changed files were rejected; keeping the old ones, will retry"
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
        self._authority = Authority(secured.security.folder, "ca")

    def _rights(self, user: str) -> list[Any]:
        names = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
        rights = [allowed(user, kind, "*", AclOperation.ALL) for kind in names]
        return [*rights, allowed(user, ResourceType.BROKER, "kafka-cluster", AclOperation.IDEMPOTENT_WRITE)]

    def certificate(self, user: str) -> dict[str, Path]:
        """Return a new certificate and its key, of a user with every right that is needed."""
        self._secured.grant(*self._rights(user))
        files = self._authority.issue(user)
        return {"client_pem": files.certificate, "client_key": files.key}

    def deny(self, user: str) -> None:
        """Take every right from a user."""
        of_user: Any = (f"User:{user}", None, AclOperation.ANY, AclPermissionType.ANY)
        any_name: Any = None
        every = AclBindingFilter(ResourceType.ANY, any_name, ResourcePatternType.ANY, *of_user)
        admin = self._secured.admin
        for removed in admin.delete_acls([every]).values():
            assert removed.result(30)

    def password(self, user: str, password: str) -> None:
        """Set a password of SCRAM, and give the user every right that is needed."""
        self._secured.set_password(user, password)
        self._secured.grant(*self._rights(user))


class Rotation:
    """A producer over HTTP and a push consumer on a secured cluster, whose files an operator changes."""

    def __init__(self, secured: SecuredCluster, start: Callable[..., Any], backend: RecordingBackend, folder: Path):
        self.name = f"rotate-{uuid.uuid4().hex[:8]}"
        self.secured, self.backend = secured, backend
        self.operator, self.mount = Operator(secured), Mount(folder / "mount")
        self.ledger = Ledger(secured.cluster, folder)
        self._start = start
        secured.cluster.create_topic(self.name, 3)
        self.mount.put(ca_pem=secured.security.authority, **self.operator.certificate(f"{self.name}-old"))

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

    def start(self, kafka: dict[str, Any], member: dict[str, Any] | None = None, **sections: Any) -> HeadraceProcess:
        """Start a process that pushes what is produced to it."""
        consumer = {
            "topics": [self.name],
            "group": self.name,
            "value_format": "json",
            "auto_offset_reset": "earliest",
            "consumer": member or {},
            "backend": {"url": self.backend.url},
        }
        process: HeadraceProcess = self._start({"kafka": kafka, "reactive_consumers": {"push": consumer}, **sections})
        return process

    @contextmanager
    def under_load(
        self, kafka: dict[str, Any], *, keyed: bool = False, **sections: Any
    ) -> Iterator[tuple[HeadraceProcess, Poster]]:
        """Start a process, and write records through it until this ends; some are written when it begins."""
        process = self.start(kafka, **sections)
        with Poster(process.url, self.name, keyed=keyed) as poster:
            poster.wait_for_more(500)
            yield process, poster

    @contextmanager
    def user_replaced(self, process: HeadraceProcess, poster: Poster) -> Iterator[None]:
        """Replace the certificate by one of another user; when this ends, the old user loses every right."""
        self.mount.put(**self.operator.certificate(f"{self.name}-new"))
        wait_replaced(process)
        yield
        self.operator.deny(f"{self.name}-old")
        poster.wait_for_more(500)

    def connect_again(self, process: HeadraceProcess) -> None:
        """Restart the broker, which closes every connection; then records are written and pushed."""
        self.secured.cluster.restart(1)
        self.ledger.wait_until(lambda: ready(process), "readiness")
        before = len(delivered_by(self.backend))
        with Poster(process.url, self.name) as poster:
            poster.wait_for_more(200)
        assert poster.not_written == []
        self.backend.wait_for(lambda seen: len(delivered_by(seen)) >= before + len(poster.with_outcome()))

    def check(self, poster: Poster) -> None:
        """Nothing was refused, lost or repeated."""
        assert poster.not_written == []
        self.ledger.check_acknowledged(self.name, poster)
        wanted = len(poster.with_outcome())
        self.backend.wait_for(lambda seen: len(delivered_by(seen)) >= wanted)
        assert len(delivered_by(self.backend)) == wanted
        assert len(self.backend.accepted) == wanted


def ready(process: HeadraceProcess) -> bool:
    return send("GET", f"{process.url}/health/readiness").status == 200


def wait_logged(process: HeadraceProcess, text: str, times: int = 1) -> None:
    Ledger.wait_until(lambda: process.output.count(text) >= times, text)


def wait_replaced(process: HeadraceProcess, times: int = 1) -> None:
    """Wait until changed files are in use by the producers, and by the consumer, which has joined its group again."""
    for line in (IN_USE, *REPLACED):
        wait_logged(process, line, times)
    # The old client commits and leaves behind that line: who takes its rights earlier makes it repeat records.
    Ledger.wait_until(lambda: "push consumer: assigned" in process.output.rpartition(REPLACED[0])[2], "its partitions")
