"""Redrives that are killed, or sleep while another takes over: nothing lost, and nothing repeated beyond the bound."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.records import TopicPartition
from headrace.runs.redrive import REPEATS_AT_MOST
from headrace_devkit.testing import Cluster
from headrace_devkit.testing.forked import ForkedCommand
from tests.faults.ledger import Ledger, dead_letter

EXACT = ("--exactly-once",)


class Redrive(Ledger):
    """A topic, its dead letters, and a group with a position in both."""

    def __init__(self, cluster: Any, folder: Path, letters: int) -> None:
        super().__init__(cluster, folder)
        self.topic, self.letters = self.new_topic(2), letters
        self.dlq = f"{self.topic}.dlq"
        cluster.create_topic(self.dlq, 2, {})
        self.write(self.dlq, *(dead_letter(self.topic, self.dlq, number) for number in range(letters)))
        group = {TopicPartition(name, 0): number for number, name in enumerate((self.topic, self.dlq))}
        asyncio.run(self.admin.alter_group_offsets(f"{self.topic}-group", group))
        self.offsets = self.offsets_of(self.topic)

    def start(self, *words: str, failpoints: str = "") -> ForkedCommand:
        self.output = self.folder / f"{time.monotonic()}"
        env = {**os.environ, "KAFKA": self.kafka.bootstrap_servers, "HEADRACE_FAILPOINTS": failpoints}
        command = ("dlq", "redrive", self.dlq, *words)
        return ForkedCommand(command, self.folder, env, self.output, self.output, Path(os.devnull))

    def run(self, *words: str, failpoints: str = "") -> int:
        code = self.start(*words, failpoints=failpoints).wait(300)
        assert "Traceback" not in self.output.read_text()
        return code

    def check(self, repeats: int) -> None:
        """Every letter is back, so many are repeated at most, and no group stands elsewhere than before."""
        times = Counter(int(record.value or b"") for record in self.records(self.topic))
        assert set(times) == set(range(self.letters))
        assert sum(times.values()) - self.letters <= repeats
        own = f"{self.topic}-group"
        assert self.offsets_of(self.topic).get(own) == self.offsets[own]


def killed(redrive: Redrive, point: str, *words: str) -> int:
    """Kill a run when it comes to a point for the second time; the next one ends. Return how many it may repeat."""
    assert redrive.run(*words, failpoints=f"{point}=crash@2") == -signal.SIGKILL
    assert redrive.run(*words) == 0
    return 0 if EXACT[0] in words else REPEATS_AT_MOST


def overtaken(redrive: Redrive) -> int:
    """Stop a run with an open transaction until another has ended, then let it wake up."""
    sleeper = redrive.start(*EXACT, "--rate", "1000", failpoints="redrive.transaction.submitted=stop@2")
    said = redrive.output
    redrive.wait_until(lambda: said.exists() and "failpoint" in said.read_text(), "the stop")
    assert redrive.run(*EXACT) == 0
    os.kill(sleeper.pid, signal.SIGCONT)
    assert sleeper.wait(300) == 1, said.read_text()
    assert "another process may have taken over" in said.read_text()
    return 0


AT_A_RATE = (*EXACT, "--rate", "2000")
"""So that a transaction has 2,000 dead letters."""
SCENARIOS: dict[str, Callable[[Redrive], int]] = {
    "sent": partial(killed, point="redrive.sent"),
    "marked": partial(killed, point="redrive.marked"),
    "submitted": lambda redrive: killed(redrive, "redrive.transaction.submitted", *AT_A_RATE),
    "in a transaction": lambda redrive: killed(redrive, "redrive.transaction.sent", *AT_A_RATE),
    "overtaken": overtaken,
}
ALWAYS = "sent"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=() if name == ALWAYS else pytest.mark.long) for name in SCENARIOS]
)
def test_what_is_killed_or_overtaken_goes_on_where_it_was(kafka: Cluster, tmp_path: Path, scenario: str) -> None:
    """Killed with records sent and not marked, marked, and in a transaction; and asleep while another takes over."""
    redrive = Redrive(kafka, tmp_path, 6000)
    redrive.check(SCENARIOS[scenario](redrive))
