"""Kills and compaction while tables catch up: each equals the fold of its topic."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import confluent_kafka
import pytest

from headrace_devkit.testing import StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.faults.ledger import Background, Ledger
from tests.table_process import TableProcess

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PARTITIONS, KEYS, PART = 3, 5_000, 100
KILLS = ["Headrace", "engine"]
COUNTED = 'SELECT count(*), count(DISTINCT (partition, "offset")), sum(n)::BIGINT FROM moves'


class Filler(Background):
    """Writes numbered records to a topic all the time; every seventh is a tombstone."""

    def __init__(self, servers: str, topic: str) -> None:
        super().__init__()
        self.written = 0
        self._topic = topic
        self._producer = confluent_kafka.Producer({"bootstrap.servers": servers})

    def _run(self, number: int) -> None:
        while not self._stopped.wait(0.02):  # else a slow machine gets more and more to do
            for n in range(self.written, self.written + PART):
                value = json.dumps({"n": n}).encode() if n % 7 else None
                self._producer.produce(self._topic, value, f"k{n % KEYS}".encode(), n % KEYS % PARTITIONS)
            assert self._producer.flush(200) == 0
            self.written += PART

    def check(self, made: TableProcess) -> None:
        """End, and wait until the log has each offset once, and the table the newest value of each key."""
        self.stop()
        sound = [n for n in range(self.written) if n % 7]
        made.wait_for(COUNTED, [[self.written, self.written, sum(sound)]])
        newest = {f"k{n % KEYS}": n if n % 7 else None for n in range(self.written)}
        expected = sorted([key, n] for key, n in newest.items() if n is not None)
        made.wait_for("SELECT key, n FROM stock ORDER BY key", expected)


class Filled:
    """A log and a table of the newest rows of a topic that is being written, and the process that keeps them."""

    def __init__(self, ledger: Ledger, start: Any) -> None:
        self.topic = ledger.new_topic(PARTITIONS)
        self.filler = Filler(ledger.kafka.bootstrap_servers, self.topic)
        columns = {"topic": self.topic, "schema": "n BIGINT"}
        self.process = start({**ledger.config, "tables": {"moves": {**columns, "kind": "log"}, "stock": columns}})
        self.made = TableProcess(self.process)
        self.seen = 0

    def wait_for_more(self) -> None:
        """Wait until more rows are applied than the last time."""

        def has_more() -> bool:
            rows = self.made.table("moves").get("rows", 0)  # the engine of statements starts behind the other one
            if rows <= self.seen:
                return False
            self.seen = rows
            return True

        Scenario.wait_until(has_more, f"more than {self.seen} rows")


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.long)])
def test_kills_while_tables_catch_up(ledger: Ledger, headrace: StartHeadrace, rounds: int) -> None:
    """Headrace and its engine are killed in turn, each time while records arrive and after some were applied."""
    filled = Filled(ledger, headrace)
    with filled.filler:
        for victim in KILLS * rounds:
            filled.wait_for_more()
            if victim == "engine":
                filled.made.kill_engine()
                if filled.made.statements_engine:
                    os.kill(filled.made.statements_engine, signal.SIGKILL)
            else:
                filled.process.kill()
                filled.process.start()
        filled.filler.check(filled.made)


OFTEN = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.001", "max.compaction.lag.ms": "100"}


@pytest.mark.long
def test_compaction_leaves_holes_and_removes_tombstones(ledger: Ledger, headrace: StartHeadrace) -> None:
    """Tables from before, across and after it equal the fold; holes are no gap, and lag ends."""
    topic = ledger.new_topic(**{"cleanup.policy": "compact", "delete.retention.ms": "0", **OFTEN})
    producer = confluent_kafka.Producer({"bootstrap.servers": ledger.kafka.bootstrap_servers})
    written: list[tuple[str, int | None]] = []

    def write(count: int) -> None:
        """Write to keys of which the first ones end with a tombstone; then nothing but the last key."""
        for n in range(len(written), len(written) + count):
            key = n % 50 if count > 1 else 50
            written.append((f"k{key}", None if count > 1 and key < 9 and n % 100 >= 50 else n))
            producer.produce(topic, None if written[-1][1] is None else json.dumps({"n": n}), written[-1][0])
        assert producer.flush(120) == 0

    def compacted() -> bool:
        write(1)  # begins another segment, as only a closed one is compacted
        left = ledger.records(topic)
        return len(left) < 60 and not any(record.value is None for record in left)

    columns = {"topic": topic, "schema": "n BIGINT"}
    config = {**ledger.config, "tables": {"stock": columns, "moves": {**columns, "kind": "log"}}}
    process = headrace(config)
    before = TableProcess(process)
    write(100)
    before.wait_for("SELECT count(*) FROM moves", [[100]])
    before.wait_for("SELECT count(*) FROM stock", [[41]])  # it has read every tombstone of before
    process.terminate()
    write(100)  # its first offset is among those that compaction removes
    ledger.wait_until(compacted, "the broker to compact")
    process.start()
    after = TableProcess(headrace({**config, "state_dir": "after"}))
    rows = sorted([key, n] for key, n in dict(written).items() if n is not None)
    assert "k8" not in dict(rows)
    left = [[record.offset] for record in ledger.records(topic)]
    after.wait_for('SELECT "offset" FROM moves ORDER BY 1', left)
    for made in (before, after):
        made.wait_for("SELECT key, n FROM stock ORDER BY key", rows)
        ledger.wait_until(lambda made=made: made.table("moves")["lag"] == 0, "no lag")
        assert {made.wait_state(name, "live")["gap"] for name in ("stock", "moves")} == {""}
