"""A backend that is down, on a real broker: it gets few requests, costs no attempt, and loses nothing."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

RECORDS, PARTITIONS, HELD, ONE_POLL = 8_000, 4, 2_000, 500


def held(site: Any, process: Any) -> float:
    text = site.ask(f"{process.url}/metrics").body
    found = re.search(r'headrace_in_flight_records\{consumer="push",kind="reactive"\} (\S+)', text)
    return float(found[1]) if found else -1


def test_a_topic_behind_a_dead_backend_stays_in_kafka(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Records in memory are bounded, the reason is reported, and everything resumes with the backend."""
    name = topic(PARTITIONS)
    site.write(name, *(OutgoingRecord(name, b"%d" % n, b"%d" % n, partition=n % PARTITIONS) for n in range(RECORDS)))
    backend.response = PlannedResponse(status=503)
    consumer = {
        "topics": [name],
        "group": f"{name}-push",
        "ordering": "key",
        "flow": {"max_records": HELD},
        "backend": {"url": backend.url, "mode": "status"},
    }
    process = headrace({**site.config, "reactive_consumers": {"push": consumer}})

    def reason() -> str:
        return str(site.reasons(process.url).get("reactive push delivery", ""))

    site.wait_until(lambda: held(site, process) >= HELD, "records to be held")
    backend.wait_for(lambda b: len(b.requests) >= 6)
    assert held(site, process) <= HELD + ONE_POLL
    site.wait_until(lambda: "the breaker of reactive push" in reason(), "the reason")
    assert re.search(r"after \d+ failures: .*HTTP 503", reason())
    assert site.ask(f"{process.url}/health/liveness").status == 200
    times = Counter((record["partition"], record["offset"]) for request in backend.requests for record in request.body)
    assert {record["attempt"] for request in backend.requests for record in request.body} == {1}
    assert sum(times.values()) <= 100 * len(backend.requests)
    backend.response = PlannedResponse()
    for partition in range(PARTITIONS):
        site.wait_committed(f"{name}-push", name, RECORDS // PARTITIONS, partition)
    assert {(record["partition"], record["offset"]) for record in backend.accepted} == {
        (n % PARTITIONS, n // PARTITIONS) for n in range(RECORDS)
    }
    assert site.records(f"{name}.dlq") == []
    site.wait_until(lambda: site.ask(f"{process.url}/health/readiness").status == 200, "readiness")
    assert "Traceback" not in process.output
