"""A certificate changes while transactions, readers, commands and jobs use it, and the old user loses every right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.control.runs.redrive import REPEATS_AT_MOST
from headrace.testing import RecordingBackend
from headrace.testing.secured import SecuredCluster
from tests.active_client import Instance, Response, send
from tests.faults.ledger import Ledger, Poster, dead_letter
from tests.faults.rotation import REFUSED, Rotation, wait_logged, wait_replaced

LETTERS = 3000


@pytest.fixture
def world(
    kafka_secured: SecuredCluster, headrace: Callable[..., Any], backend: RecordingBackend, tmp_path: Path
) -> Rotation:
    made = Rotation(kafka_secured, headrace, backend, tmp_path)
    made.mount.put(**made.operator.certificate(f"{made.name}-old"))
    return made


@contextmanager
def rotated(world: Rotation, process: Any, poster: Poster) -> Iterator[None]:
    """Replace the certificate by one of another user; when this ends, the old one loses its rights."""
    world.mount.put(**world.operator.certificate(f"{world.name}-new"))
    wait_replaced(process)
    yield
    world.operator.deny(f"{world.name}-old")
    poster.wait_for_more(500)


@pytest.mark.long
def test_transactions_are_written_by_a_new_client(world: Rotation) -> None:
    """Each request is one transaction; none is refused, lost or there twice."""
    producer = {"transactions": {"id": world.name, "producers": 2}, "idempotency": {"topic": f"{world.name}-keys"}}
    with (
        world.under_load(world.tls(), keyed=True, producer=producer) as (process, poster),
        rotated(world, process, poster),
    ):
        wait_logged(process, "is replaced: the files of kafka.security have changed", 2)
    world.check(poster)


class Requests:
    """Sends a request again and again, in a thread, and keeps the responses."""

    def __init__(self, url: str) -> None:
        self.responses: list[Response] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(150)

    def wait_for_more(self, count: int = 3) -> None:
        wanted = len(self.responses) + count
        Ledger.wait_until(lambda: len(self.responses) >= wanted, "answers")

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.responses.append(send("GET", self._url))


@pytest.mark.long
def test_reads_control_and_audit_use_the_new_certificate(world: Rotation) -> None:
    """Reads without an instance are answered all the time; commands are read from their topic, and audited."""
    audit = f"{world.name}-audit"
    sections = {"control": {"topic": f"{world.name}-control"}, "audit": {"to": "topic", "topic": audit}}
    with world.under_load(world.tls(), **sections) as (process, poster):
        path = f"/topics/{world.name}/partitions/0/records?offset=0&count=5"
        with Requests(process.url + path) as reads, rotated(world, process, poster):
            reads.wait_for_more()
        known = len(world.ledger.records(audit))
        for action in ("pause", "resume"):
            response = send("POST", f"{process.url}/adm/reactive-consumers/push/{action}", {})
            assert response.status == 200, response
        Ledger.wait_until(lambda: len(world.ledger.records(audit)) > known, "audited requests")
        poster.wait_for_more(200)
    assert Counter((response.status, len(response.body["records"])) for response in reads.responses) == {
        (200, 5): len(reads.responses)
    }
    world.check(poster)


def connections(pid: int, port: int) -> set[str]:
    """Return the sockets of a process that are connected to a port."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    to_port = {fields[9] for fields in lines if fields[2].endswith(f":{port:04X}") and fields[3] == "01"}
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return to_port & {link.removeprefix("socket:[").removesuffix("]") for link in links}


@pytest.mark.long
def test_a_command_that_follows_a_topic_connects_again(world: Rotation, tmp_path: Path) -> None:
    """It prints every record once, those included that are written when the old user has no right."""
    file, printed = tmp_path / "follow.yaml", tmp_path / "printed"
    file.write_text(yaml.safe_dump({"kafka": world.tls()}))
    port = int(world.secured.cluster.tls_servers.rpartition(":")[2])
    command = [sys.executable, "-m", "headrace.cli.main", "consume", world.name, "--follow", "-c", str(file)]
    with (
        printed.open("wb") as output,
        world.under_load(world.tls()) as (process, poster),
        subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, cwd=tmp_path) as following,
        ended(following),
    ):
        Ledger.wait_until(lambda: len(printed.read_bytes().splitlines()) > 100, "printed records")
        before = connections(following.pid, port)
        with rotated(world, process, poster):
            Ledger.wait_until(
                lambda: before.isdisjoint(connections(following.pid, port) or before), "new connections of the command"
            )
        wanted = len(poster.told())
        Ledger.wait_until(
            lambda: len(printed.read_bytes().splitlines()) >= wanted or following.poll() is not None, "every record"
        )
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=150)
    assert b"no right" not in errors, errors
    counts = Counter(json.loads(line)["id"] for line in printed.read_bytes().splitlines())
    assert {json.loads(one.value)["id"] for one in poster.told()[:wanted]} <= set(counts)
    assert set(counts.values()) == {1}


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a command whose test has failed, and show what it said."""
    try:
        yield
    except AssertionError as failure:
        process.kill()
        raise AssertionError(f"{failure}; {process.communicate()[1].decode()}") from failure


@pytest.mark.long
def test_a_store_that_is_half_written_is_not_used(world: Rotation, tmp_path: Path) -> None:
    """Clients that are made meanwhile use the store from before; the whole one is taken up."""
    store = tmp_path / "client.p12"

    def issue(user: str) -> bytes:
        return world.operator.certificate(user)["client_pem"].with_suffix(".p12").read_bytes()

    transactions = f"{world.name}-transactions"
    world.secured.cluster.create_topic(transactions)
    store.write_bytes(issue(f"{world.name}-old"))
    store.chmod(0o600)
    producer = {"transactions": {"id": world.name, "producers": 1}, "idempotency": {"topic": f"{world.name}-keys"}}
    with world.under_load(world.store(store), producer=producer) as (process, poster):
        new = issue(f"{world.name}-new")
        store.write_bytes(new[: len(new) // 2])
        wait_logged(process, REFUSED)
        instance = Instance(process.url, f"{world.name}-readers")
        instance.ok("POST", "/subscriptions", {"topics": [world.name]})
        assert instance.first()
        with Poster(process.url, transactions, keyed=True) as keyed:
            keyed.wait_for_more(100)
        assert keyed.not_written == []
        store.write_bytes(new)
        wait_replaced(process)
        world.operator.deny(f"{world.name}-old")
        poster.wait_for_more(500)
    world.check(poster)
    world.ledger.check_acknowledged(transactions, keyed)


@pytest.mark.long
@pytest.mark.parametrize("exactly_once", [False, True], ids=["plain", "exactly-once"])
def test_a_redrive_ends_though_the_user_of_its_lease_loses_every_right(world: Rotation, exactly_once: bool) -> None:
    """Its lease and its session keep the old user; what that costs is another run, and no dead letter."""
    topic, dead = f"{world.name}-redriven", f"{world.name}-redriven.dlq"
    for name in (topic, dead):
        world.secured.cluster.create_topic(name, 2)
    world.ledger.write(dead, *(dead_letter(topic, dead, number) for number in range(LETTERS)))
    control = {"control": {"topic": f"{world.name}-control"}}
    with world.under_load(world.tls(), **control) as (process, poster):
        body = {"rate": 100, "exactlyOnce": exactly_once}
        began = send("POST", f"{process.url}/adm/dead-letters/{dead}/redrive", body)
        assert began.status == 202, began
        Ledger.wait_until(lambda: world.ledger.records(topic), "redriven records")
        with rotated(world, process, poster):
            pass
        job = end_of(process.url, began.body["id"])
        while job["state"] != "done":
            assert job["state"] == "failed", job
            assert "no right" in job["message"] or "session is over" in job["message"], job
            again = send("POST", f"{process.url}/adm/dead-letters/{dead}/redrive", {"exactlyOnce": exactly_once})
            job = end_of(process.url, again.body["id"])
    world.check(poster)
    times = Counter(int(record.value or b"") for record in world.ledger.records(topic))
    assert set(times) == set(range(LETTERS))
    assert sum(times.values()) - LETTERS <= (0 if exactly_once else REPEATS_AT_MOST), job


def end_of(url: str, job: str) -> dict[str, Any]:
    """Wait until a job has ended, and return it."""
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(send("GET", f"{url}/adm/jobs/{job}").body)
        return found["state"] in ("done", "failed", "stopped")

    Ledger.wait_until(ended, f"the end of {job}")
    return found
