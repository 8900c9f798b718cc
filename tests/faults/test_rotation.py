"""Certificates and secrets change on disk under load: nothing is lost or repeated, and no caller gets an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_devkit.testing import RecordingBackend, StartHeadrace
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import Response, send
from tests.faults.ledger import Background, Ledger
from tests.faults.rotation import IN_USE, REFUSED, Rotation, wait_logged


@pytest.fixture
def rotation(
    kafka_secured: SecuredCluster, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path
) -> Rotation:
    return Rotation(kafka_secured, headrace, backend, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "member",
    [{}, {"properties": {"group.instance.id": "one"}}, {"properties": {"group.protocol": "consumer"}}],
    ids=["member", "static", "kip-848"],
)
def test_a_new_certificate_of_another_user_is_taken_up(rotation: Rotation, member: dict[str, Any]) -> None:
    """The old user loses every right as soon as the clients are replaced; the new one has them."""
    with (
        rotation.under_load(rotation.tls(), member=member) as (process, poster),
        rotation.user_replaced(process, poster),
    ):
        pass
    rotation.check(poster)


@pytest.mark.long
@pytest.mark.parametrize("first", ["broker", "file"])
def test_a_new_password_is_taken_up(rotation: Rotation, first: str) -> None:
    """Whether the broker knows it before the file or after; then every connection is opened again."""
    rotation.operator.password(rotation.name, "old-password")
    rotation.mount.put(password="old-password")
    with rotation.under_load(rotation.scram()) as (process, poster):
        changes: list[Callable[[], None]] = [
            lambda: rotation.operator.password(rotation.name, "new-password"),
            lambda: rotation.mount.put(password="new-password\n"),
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
    rotation.check(poster)
    rotation.connect_again(process)


class Reads(Background):
    """Reads from one URL again and again."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.responses: list[Response] = []
        self._url = url

    def _run(self, number: int) -> None:
        while not self._stopped.wait(0.05):
            self.responses.append(send("GET", self._url))


@pytest.mark.long
def test_transactions_reads_commands_and_audit_use_the_new_certificate(rotation: Rotation) -> None:
    """Each transaction is written once, and reads get a response all the time; commands are obeyed and audited."""
    name, audit = rotation.name, f"{rotation.name}-audit"
    sections = {
        "producer": {"transactions": {"id": name}, "idempotency": {"topic": f"{name}-keys"}},
        "control": {"topic": f"{name}-control"},
        "audit": {"to": "topic", "topic": audit},
    }
    with rotation.under_load(rotation.tls(), keyed=True, **sections) as (process, poster):
        url = f"{process.url}/topics/{name}/partitions/0/records?offset=0&count=5"
        with Reads(url) as reads, rotation.user_replaced(process, poster):
            wait_logged(process, "is replaced: the files of kafka.security have changed", 2)
            wanted = len(reads.responses) + 3
            Ledger.wait_until(lambda: len(reads.responses) >= wanted, "reads")
        known = len(rotation.ledger.records(audit))
        for action in ("pause", "resume"):
            response = send("POST", f"{process.url}/adm/reactive-consumers/push/{action}", {})
            assert response.status == 200, response
        Ledger.wait_until(lambda: len(rotation.ledger.records(audit)) > known, "audited requests")
        poster.wait_for_more(200)
    assert {(response.status, len(response.body["records"])) for response in reads.responses} == {(200, 5)}
    rotation.check(poster)


def connections(pid: int, port: int) -> set[str]:
    """Return the sockets of a process that are connected to a port."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    to_port = {fields[9] for fields in lines if fields[2].endswith(f":{port:04X}") and fields[3] == "01"}
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return to_port & {link.removeprefix("socket:[").removesuffix("]") for link in links}


@pytest.mark.long
def test_a_command_that_follows_a_topic_connects_again(rotation: Rotation, tmp_path: Path) -> None:
    """It prints every record once, those included that are written when the old user has no right."""
    file, printed = tmp_path / "follow.yaml", tmp_path / "printed"
    file.write_text(yaml.safe_dump({"kafka": rotation.tls()}))
    port = int(rotation.secured.cluster.tls_servers.rpartition(":")[2])
    command = [sys.executable, "-m", "headrace.cli.main", "consume", rotation.name, "--follow", "-c", str(file)]
    with (
        printed.open("wb") as output,
        rotation.under_load(rotation.tls()) as (process, poster),
        subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, cwd=tmp_path) as following,
        ended(following),
    ):
        Ledger.wait_until(lambda: len(printed.read_bytes().splitlines()) > 100, "printed records")
        before = connections(following.pid, port)
        with rotation.user_replaced(process, poster):
            Ledger.wait_until(
                lambda: before.isdisjoint(connections(following.pid, port) or before), "new connections of the command"
            )
        wanted = len(poster.with_outcome())
        Ledger.wait_until(
            lambda: len(printed.read_bytes().splitlines()) >= wanted or following.poll() is not None, "every record"
        )
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=150)
    assert b"no right" not in errors, errors
    counts = Counter(json.loads(line)["id"] for line in printed.read_bytes().splitlines())
    assert {json.loads(one.value)["id"] for one in poster.with_outcome()[:wanted]} <= set(counts)
    assert set(counts.values()) == {1}


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a command whose test has failed, and show what it said."""
    try:
        yield
    except AssertionError as failure:
        process.kill()
        raise AssertionError(f"{failure}; {process.communicate()[1].decode()}") from failure
