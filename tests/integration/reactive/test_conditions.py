"""Records that `where` and `max_age` keep from a backend and from a handler, on a real broker."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, RecordingBackend
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file

WHERE = "value.n IN (1, 3, 5, 7, 9)"


def errors(site: Any, topic: str) -> dict[str, str]:
    """Return the error of each dead letter by the offset of its record."""
    found = [{name: (data or b"").decode() for name, data in record.headers} for record in site.records(topic)]
    return {headers["headrace.dlq.offset"]: headers["headrace.dlq.error"] for headers in found}


def ended(site: Any, url: str, consumer: str) -> dict[str, int]:
    """Return the records of a consumer that have ended, by outcome."""
    lines = site.ask(f"{url}/metrics").body.splitlines()
    own = [one for one in lines if one.startswith("headrace_completed_records_total") and f'"{consumer}"' in one]
    found = {one.split('outcome="')[1].split('"')[0]: int(float(one.rsplit(" ", 1)[1])) for one in own}
    return {outcome: count for outcome, count in found.items() if count}


def test_a_backend_and_a_handler_get_the_records_that_are_new_and_meet_the_condition(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend, tmp_path: Path
) -> None:
    """Others complete in place; what cannot be judged, and what is too old, is a dead letter, or discarded as set."""
    name, target = topic(), topic()
    old_ms = int(time.time() - 3600) * 1000
    values = [b"no json" if n == 3 else b'{"n": %d}' % n for n in range(10)]
    times = [old_ms if n in (4, 5) else 0 for n in range(10)]
    site.write(name, *(OutgoingRecord(name, b"k", v, timestamp_ms=t) for v, t in zip(values, times, strict=True)))
    own = {"topics": [name], "consumerGroup": target, "where": WHERE, "maxAge": "10m", "delivery": "exactly_once"}
    own |= {"outputTopic": target, "deadLetterTopic": f"{target}.dead", "retry": {"errors": {"RecordExpired": "skip"}}}
    code = "def handler(context, event):\n    return event.body\n"
    file = function_file(tmp_path, code, {"in": {"kind": "kafka-cluster", "attributes": own}})
    audit = {"to": "topic", "records": "failed", "topic": f"{name}-audit"}
    process = push(name, more={"functions": [file], "audit": audit}, where=WHERE, max_age_seconds=600)
    site.wait_committed(f"{name}-push", name, 10)
    site.wait_committed(target, name, 10)
    assert [entry["offset"] for entry in backend.accepted] == [1, 7, 9]
    assert errors(site, f"{name}.dlq") == {"3": "DecodeError", "5": "RecordExpired"}
    assert ended(site, process.url, name) == {"delivered": 3, "filtered": 5, "dead_letter": 2}
    assert [record.value for record in site.records(target)] == [values[1], values[7], values[9]]
    assert errors(site, f"{target}.dead") == {"3": "DecodeError"}
    assert ended(site, process.url, "work.in") == {"delivered": 3, "filtered": 5, "skipped": 1, "dead_letter": 1}
    consumers = site.ask(f"{process.url}/adm/reactive-consumers").body
    assert str(consumers).count("'filtered': 5") == 2, consumers
    assert process.terminate() == 0
    events = [json.loads(record.value or b"") for record in site.records(f"{name}-audit")]
    reasons = Counter(event.get("reason") for event in events if event["auditType"].endswith("CONSUMER"))
    assert reasons == {
        "filtered": 10,
        "dead letter: DecodeError": 2,
        "dead letter: RecordExpired": 1,
        "skipped: RecordExpired": 1,
    }
