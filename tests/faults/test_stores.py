"""The backend of docs/stores.md: each record has its effect once, whoever is killed at the worst moment."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import StartHeadrace
from tests.faults.ledger import Ledger
from tests.faults.push_scenario import SHORT_SESSION
from yaml_table import table

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
CRASHING = table(__file__, "crashing")


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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    if store.process:
        store.process.kill()
        store.process.wait()


@pytest.mark.timeout(400)
def test_each_record_has_its_effect_once(ledger: Ledger, headrace: StartHeadrace, store: Store) -> None:
    """The store dies between transaction and response, twice; Headrace is killed; the group's offsets are set back."""
    name = ledger.new_topic(2)
    group = f"{name}-totals"
    push = {
        "topics": [name],
        "group": group,
        "batch": {"max_records": 1},
        "retry": {"first_delay_seconds": 0.05, "max_delay_seconds": 0.2},
        "consumer": SHORT_SESSION,
        "backend": {"url": f"http://127.0.0.1:{store.port}/payments", "offsets_path": "/offsets"},
    }
    payments = [(account, amount) for account in range(3) for amount in range(1, 31)]
    values = [json.dumps({"account": str(account), "amount": amount}).encode() for account, amount in payments]
    ledger.write(name, *(OutgoingRecord(name, None, value, None, n % 2) for n, value in enumerate(values)))
    sent = {str(account): sum(range(1, 31)) for account in range(3)}
    config = {**ledger.config, "reactive_consumers": {"totals": push}}
    crashed = store.start(crash_at=10)
    process = headrace(config)
    assert crashed.wait(150) == 7
    crashed = store.start(crash_at=20)
    assert crashed.wait(150) == 7
    process.kill()
    store.start()
    process = headrace(config)
    ledger.wait_committed_all(name, group)
    assert process.terminate() == 0
    assert dict(store.rows("SELECT account, amount FROM totals")) == sent

    asyncio.run(ledger.admin.alter_group_offsets(group, {TopicPartition(name, n): 0 for n in range(2)}))
    headrace(config)
    ledger.wait_committed_all(name, group)
    assert dict(store.rows("SELECT account, amount FROM totals")) == sent
    assert store.rows("SELECT topic_partition, next_offset FROM headrace_offsets ORDER BY 1") == [(0, 45), (1, 45)]
