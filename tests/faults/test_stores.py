"""The backend of docs/stores.md: each record has its effect once, whoever is killed at the worst moment."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.devcluster.ports import free_ports
from headrace.kafka import Admin
from headrace.records import TopicPartition

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
CRASHING = """\
import os, sys
import totals

class Crashing(totals.Totals):
    posts = 0

    def answer(self, status, value):
        Crashing.posts += self.command == "POST"
        if Crashing.posts == int(sys.argv[1]):
            os._exit(7)  # the transaction is over, and nobody is told
        super().answer(status, value)

totals.HTTPServer(("127.0.0.1", int(sys.argv[2])), Crashing).serve_forever()
"""


class Store:
    """The page's backend as a process that can be told to crash behind its n-th transaction."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        [text] = re.findall(r"^```python\n(# totals\.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        (folder / "totals.py").write_text(text)
        (folder / "crashing.py").write_text(CRASHING)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, crash_at: int = -1) -> subprocess.Popen[bytes]:
        command = [sys.executable, "crashing.py", str(crash_at), str(self.port)]
        self.process = subprocess.Popen(command, cwd=self.folder, stderr=subprocess.DEVNULL)
        return self.process

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "totals.db")) as database:
            return database.execute(query).fetchall()


def post(url: str, topic: str, records: list[dict[str, Any]]) -> None:
    body = json.dumps({"records": records}).encode()
    request = urllib.request.Request(f"{url}/producers/{topic}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert all("offset" in entry for entry in json.load(answer)["offsets"])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    if store.process:
        store.process.kill()
        store.process.wait()


@pytest.mark.timeout(400)
def test_each_record_has_its_effect_once(
    kafka: Any, topic: Callable[..., str], headrace: Any, store: Store, bed: Any
) -> None:
    """The store dies between transaction and answer, twice; Headrace is killed; the group's offsets are set back."""
    name = topic(2)
    group = f"{name}-totals"
    place = {"bootstrap_servers": kafka.bootstrap_servers, "properties": {"session.timeout.ms": 3000}}
    push = {
        "topics": [name],
        "group": group,
        "batch": {"max_records": 1},
        "retry": {"first_delay_seconds": 0.05, "max_delay_seconds": 0.2},
        "backend": {"url": f"http://127.0.0.1:{store.port}/payments", "offsets_path": "/offsets"},
    }
    ledger = bed.Ledger(kafka.bootstrap_servers)
    source = headrace({"kafka": place})
    sent = Counter[str]()
    for account in range(3):
        amounts = range(1, 31)
        records = [{"partition": n % 2, "value": {"account": str(account), "amount": n}} for n in amounts]
        post(source.url, name, records)
        sent[str(account)] += sum(amounts)
    config = {"kafka": place, "reactive_consumers": {"totals": push}}
    crashed = store.start(crash_at=10)
    process = headrace(config)
    assert crashed.wait(150) == 7
    crashed = store.start(crash_at=20)
    assert crashed.wait(150) == 7
    process.kill()
    store.start()
    process = headrace(config)
    bed.wait_until(lambda: ledger.lag(group) == 0, 60, "lag 0")
    assert process.terminate() == 0
    assert dict(store.rows("SELECT account, amount FROM totals")) == sent

    admin = Admin(KafkaConfig(bootstrap_servers=kafka.bootstrap_servers, request_timeout_seconds=60))
    asyncio.run(admin.alter_group_offsets(group, {TopicPartition(name, n): 0 for n in range(2)}))
    headrace(config)
    bed.wait_until(lambda: ledger.lag(group) == 0, 60, "the group where its store is")
    assert dict(store.rows("SELECT account, amount FROM totals")) == sent
    assert store.rows("SELECT topic_partition, next_offset FROM headrace_offsets ORDER BY 1") == [(0, 45), (1, 45)]
