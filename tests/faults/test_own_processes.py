"""Our own processes are killed in the midst of their work: everything is delivered at least once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import Answer


def children(pid: int, word: str) -> list[int]:
    """Return the processes below `pid` whose command line holds a word."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = stat.with_name("cmdline").read_bytes().decode()
        except (OSError, IndexError):
            continue
        if parent == pid and word in command:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.timeout(600)
def test_headrace_is_killed_while_it_pushes(
    kafka: Any, topic: Callable[..., str], headrace: Any, backend: Any, bed: Any
) -> None:
    """After each kill -9 a new process takes up at the committed offset; what was in flight comes again."""
    name = topic(4)
    ledger = bed.Ledger(kafka.bootstrap_servers)
    backend.answer = Answer(delay_seconds=0.02)
    config = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers, "properties": {"session.timeout.ms": 2000}},
        "reactive_consumers": {
            "push": {
                "topics": [name],
                "group": f"{name}-push",
                "backend": {"url": backend.url},
                "batch": {"max_records": 100},
            }
        },
    }
    source = headrace({"kafka": config["kafka"]})
    with bed.CommitWatch(ledger, f"{name}-push", backend) as watch:
        with bed.Poster(source.url, name) as poster:
            for _ in range(3):
                process = headrace(config)
                had = len(backend.accepted)
                backend.wait_for(lambda b, had=had: len(b.accepted) > had + 200, 150)
                process.kill()
        headrace(config)
        bed.wait_until(lambda: not ledger.missing(name, bed.delivered_by(backend)), 90, "deliveries")
        bed.wait_until(lambda: ledger.lag(f"{name}-push") == 0, 30, "lag 0")
        watch.wait_for_more()
    ledger.check_acknowledged(name, poster)
    ledger.check_delivered(name, bed.delivered_by(backend))
    assert watch.violations == []


@pytest.mark.timeout(600)
def test_workers_of_a_function_are_killed(kafka: Any, topic: Callable[..., str], headrace: Any, bed: Any) -> None:
    """Each death costs repeats and nothing else; the function goes on with new workers."""
    source, target = topic(4), topic(4)
    ledger = bed.Ledger(kafka.bootstrap_servers)
    process = headrace(
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "functions": [bed.copy_function(source, target)],
        }
    )
    killed: set[int] = set()

    def ids(name: str) -> set[int]:
        return {bed.id_of(record) for record in ledger.records(name)}

    with bed.Poster(process.url, source) as poster:
        for _ in range(4):
            poster.wait_for_more(300)
            end = time.monotonic() + 100
            while not (alive := set(children(process.server.id.pid, "headrace.functions.worker")) - killed):
                assert time.monotonic() < end, "no new worker came up"
                time.sleep(0.02)
            victim = alive.pop()
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        poster.wait_for_more(300)
    bed.wait_until(lambda: ids(source) == ids(target), 60, "copies")
    bed.wait_until(lambda: ledger.lag(f"{source}-copy") == 0, 30, "lag 0")
    ledger.check_acknowledged(source, poster)
    assert len(killed) == 4
    assert process.terminate() == 0
