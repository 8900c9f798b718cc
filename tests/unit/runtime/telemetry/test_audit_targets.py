"""Where events of the audit go: a file, which is rotated, and a topic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import HeadraceError, KafkaTimeout, ProducerQueueFull
from headrace.records import OutgoingRecord, Produced
from headrace.runtime.telemetry.audit_targets import AuditFile, AuditTopic


async def test_the_file_is_rotated_when_it_is_full(tmp_path: Path) -> None:
    """Whole lines in each, as many old ones as configured, and only the owner may read them."""
    file = tmp_path / "log" / "audit.log"
    target = AuditFile(file, max_bytes=100, old_files=2)

    await target.write(())
    assert file.read_bytes() == b"", "it is there before the first event"
    for number in range(20):
        assert await target.write([(b"c", f'{{"n":{number}}}'.encode())] * 2) == (0, "")

    assert sorted(path.name for path in file.parent.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2"]
    for path in file.parent.iterdir():
        assert path.stat().st_size <= 100
        assert path.stat().st_mode & 0o077 == 0
        assert all("n" in json.loads(line) for line in path.read_text().splitlines())
    assert json.loads(file.read_text().splitlines()[-1]) == {"n": 19}


def test_events_that_a_file_does_not_take_are_counted(tmp_path: Path) -> None:
    """Nothing is raised, and the reason names the file."""
    (tmp_path / "log").write_text("a file where the folder should be")
    target = AuditFile(tmp_path / "log" / "audit.log")
    lost, why = asyncio.run(target.write([(b"c", b"{}"), (b"c", b"{}")]))
    assert (lost, why.partition(":")[0]) == (2, f"failed to write {tmp_path / 'log' / 'audit.log'}")


def test_the_topic_gets_the_correlation_id_as_key() -> None:
    """What Kafka does not take is counted as lost, with the reason; also when it takes nothing."""
    sent: list[OutgoingRecord] = []

    async def produce(records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
        sent.extend(records)
        if len(records) == 1:
            raise ProducerQueueFull("full")
        return [Produced(0, 0), KafkaTimeout("no response")]

    target = AuditTopic("sidecar-audit", produce)
    assert asyncio.run(target.write([(b"c-1", b"{}"), (b"", b"[]")])) == (1, "no response")
    assert asyncio.run(target.write([(b"c-1", b"{}")])) == (1, "full")
    assert [(record.topic, record.key, record.value) for record in sent[:2]] == [
        ("sidecar-audit", b"c-1", b"{}"),
        ("sidecar-audit", None, b"[]"),
    ]
