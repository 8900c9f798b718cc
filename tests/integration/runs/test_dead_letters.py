"""Dead letters on a real broker: redriven by the command line, one run at a time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import command_environment
from tests.dead_letter_records import bury

COMMAND = [sys.executable, "-m", "headrace.cli.main"]


def letters_of(site: Any, topic: str, count: int, errors: Sequence[str] = ("HTTP 400",)) -> str:
    """Write records to the topic, and each as a dead letter; return the topic of these."""
    own = [("trace", b"\x00\xff"), ("trace", None)]
    made = (OutgoingRecord(topic, f"k{n}".encode(), f"v{n}\xff".encode("latin-1"), own) for n in range(count))
    site.write(topic, *made)
    return bury(site, topic, errors=errors)


def values(site: Any, topic: str) -> list[bytes]:
    return sorted(record.value or b"" for record in site.records(topic))


def left(site: Any, dlq: str) -> int:
    return int(json.loads(site.cli("dlq", "list", dlq, "--output", "json").stdout)[0]["left"])


def start(site: Any, folder: Path, failpoints: str, *words: str) -> subprocess.Popen[str]:
    """Start a command that reaches a failpoint, and return it when it is there."""
    env = {**command_environment(site.kafka.bootstrap_servers, folder), "HEADRACE_FAILPOINTS": failpoints}
    begun = subprocess.Popen([*COMMAND, *words], cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    assert begun.stderr
    assert f"failpoint {failpoints.partition('=')[0]}" in begun.stderr.readline()
    return begun


def test_letters_are_counted_and_redriven_byte_for_byte(site: Scenario, topic: MakeTopic) -> None:
    """The whole way: numbers, a dry run, the redrive, and nothing left; records come back as they were."""
    name = topic(3)
    dlq = letters_of(site, name, 40)
    assert left(site, dlq) == 40
    said = site.cli("dlq", "redrive", dlq, "--dry-run").stdout
    assert said.startswith(f"40 dead letters of {dlq} would go back: 40 to {name}\n")
    assert "  error  HTTP 400" in said
    assert len(site.records(name)) == 40
    said = site.cli("dlq", "redrive", dlq).stdout
    assert said == f"40 dead letters of {dlq} back and acknowledged: 40 to {name}\n"

    records = site.records(name)
    first = {(r.partition, r.offset): r for r in records if not any(h[0].startswith("headrace.") for h in r.headers)}
    again = [r for r in records if (r.partition, r.offset) not in first]
    assert len(first) == len(again) == 40
    for record in again:
        headers = dict(record.headers)
        _, partition, offset = (headers["headrace.redrive.of"] or b"").decode().rsplit(":", 2)
        origin = first[int(partition), int(offset)]
        assert (record.key, record.value, record.partition) == (origin.key, origin.value, origin.partition)
        assert record.headers[:2] == [("trace", b"\x00\xff"), ("trace", None)]
        assert headers["headrace.redrive.count"] == b"1"
        assert len(record.headers) == 4

    assert site.cli("dlq", "redrive", dlq).stdout == f"nothing left to redrive in {dlq}\n"
    assert left(site, dlq) == 0


def test_a_forged_origin_is_left(site: Scenario, topic: MakeTopic, tmp_path: Path) -> None:
    """A dead letter that names a topic which its consumer does not read, with and without a configuration."""
    name, other = topic(), topic()
    dlq = letters_of(site, name, 2)

    headers = [(n, other.encode() if n == "headrace.dlq.topic" else v) for n, v in site.records(dlq)[0].headers]
    site.write(dlq, OutgoingRecord(dlq, b"forged", b"!", headers))
    dry = site.cli("dlq", "redrive", dlq, "--dry-run", code=1)
    assert f"2 dead letters of {dlq} would go back: 2 to {name}" in dry.stdout
    assert f"not sent: 1 dead letter: they name {other} as their origin" in dry.stderr
    consumer = {"topics": [name], "group": "billing", "backend": {"url": "http://127.0.0.1:1"}}
    (tmp_path / "headrace.yaml").write_text(json.dumps({**site.config, "reactive_consumers": {"bills": consumer}}))
    done = site.cli("dlq", "redrive", dlq, code=1)
    assert f"they name {other} as their origin, which their group billing does not read" in done.stderr
    assert (left(site, dlq), values(site, other)) == (1, [])
    site.cli("dlq", "drop", dlq, "--reason", "forged")
    assert left(site, dlq) == 0


def test_a_wrong_window_and_another_topic_are_refused(site: Scenario, topic: MakeTopic) -> None:
    """Each says what is wrong, and nothing is sent."""
    name = topic()
    dlq = letters_of(site, name, 3)
    redrive = ("dlq", "redrive", dlq)
    first = ("--partition", "0", "--offsets")
    assert "it has 0 to 2" in site.cli(*redrive, *first, "3", code=1).stderr
    assert "neither a time" in site.cli(*redrive, "--since", "soon", code=2).stderr
    assert "is not a dead letter" in site.cli("dlq", "drop", name, "--reason", "x", code=1).stderr
    assert "does not exist" in site.cli("dlq", "redrive", f"{name}.gone", code=1).stderr
    assert len(site.records(name)) == 3
    assert left(site, dlq) == 3


def test_one_run_at_a_time(site: Scenario, topic: MakeTopic, tmp_path: Path) -> None:
    """While one is in the middle of its work others are refused with its name, and do nothing."""
    name = topic()
    dlq = letters_of(site, name, 5)
    with start(site, tmp_path, "redrive.sent=delay:90", "dlq", "redrive", dlq) as first:
        for words in (["drop", dlq, "--reason", "x"], ["redrive", dlq]):
            assert f"(pid {first.pid} on " in site.cli("dlq", *words, code=1).stderr
        first.kill()
    assert values(site, name) == sorted(values(site, dlq) * 2)


def test_interrupted_by_ctrl_c_nothing_is_half_done(site: Scenario, topic: MakeTopic, tmp_path: Path) -> None:
    """The slice under way is marked before the command ends, so the next run sends the rest and nothing twice."""
    name = topic()
    dlq = letters_of(site, name, 100)
    with start(site, tmp_path, "redrive.submitted=delay:2@2", "dlq", "redrive", dlq, "--rate", "20") as first:
        first.send_signal(signal.SIGINT)
        assert first.wait(100) == 130
    went = 100 - left(site, dlq)
    assert len(values(site, name)) == 100 + went
    site.cli("dlq", "redrive", dlq)
    assert values(site, name) == sorted(values(site, dlq) * 2)
