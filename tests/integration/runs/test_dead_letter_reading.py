"""Dead letters on a real broker as operators look at them: by the command and over HTTP."""

import base64
import json
from collections.abc import Sequence
from typing import Any

from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.records import Header, OutgoingRecord, Record
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from tests.dead_letter_records import written_for

OWN: list[Header] = [("tenant", b"acme"), ("bytes", b"\xff")]


def letters_of(topic: str, values: Sequence[bytes], group: str = "g") -> list[OutgoingRecord]:
    """Return records as a reactive consumer writes them: every third is an HTTP 500, the others a ValueError."""
    letters = []
    for n, value in enumerate(values):
        error, status = ("HTTP 500", 500) if n % 3 == 0 else ("ValueError", None)
        details = (("key", f"order-{n}"), ("correlation_id", "c-1"))
        outcome = Reply(error, f"no such order {n}", status, details)
        record = Record(topic, 0, n, 1_700_000_000_000 + n, b"k%d" % n, value, lambda: OWN)
        letters.append(DeadLetter(record, group, 5, outcome, 1.0, 2.0))
    return written_for(letters)


def buried(site: Any, kafka: Any, topic: str, values: Sequence[bytes], partitions: int = 1) -> str:
    """Make a dead letter topic with these letters, in turns over its partitions."""
    dlq = f"{topic}.dlq"
    kafka.create_topic(dlq, partitions, {})
    letters = letters_of(topic, values)
    site.write(dlq, *(OutgoingRecord(dlq, r.key, r.value, r.headers, n % partitions) for n, r in enumerate(letters)))
    return dlq


def test_a_letter_says_where_it_came_from_and_what_it_holds(site: Scenario, kafka: Cluster, topic: MakeTopic) -> None:
    """History, result, own headers; JSON, text and bytes each as what they are."""
    name = topic()
    dlq = buried(site, kafka, name, [b'{"count": 12345678901234567890.10}', b"plain", b"\xfe\x01"])
    page = json.loads(site.cli("dlq", "show", dlq, "--order", "oldest", "--output", "json").stdout)
    first, second, third = page["deadLetters"]
    assert (first["error"], first["status"], first["reason"]) == ("HTTP 500", "500", "no such order 0")
    assert (first["group"], first["attempts"], first["completed"], first["redrives"]) == ("g", 5, False, 0)
    assert first["origin"] == {"topic": name, "partition": 0, "offset": 0, "timestamp": "2023-11-14T22:13:20.000+00:00"}
    assert first["result"] == {"key": "order-0", "correlationId": "c-1"}
    assert first["headers"] == [["tenant", "acme"], ["bytes", "\\xff"]]
    assert (first["keyFormat"], first["key"], first["valueFormat"]) == ("string", "k0", "json")
    assert (second["valueFormat"], second["value"]) == ("string", "plain")
    assert (third["valueFormat"], third["value"]) == ("binary", base64.b64encode(b"\xfe\x01").decode())
    said = site.cli("dlq", "show", dlq, "--order", "oldest", "--max", "1")
    assert 'value (json)     {"count": 12345678901234567890.10}' in said.stdout
    assert "continue with --cursor oldest.0-1" in said.stderr
