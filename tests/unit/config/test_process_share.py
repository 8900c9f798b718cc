"""What each of several processes gets of one configuration."""

from __future__ import annotations

import pickle

from headrace.config.process_share import ProcessShare
from headrace.config.whole_file import WholeFile
from headrace.runtime.telemetry.joined_metrics import joined_metrics
from headrace_console.console_sections import ConsoleSections

PUSH = {"topics": ["a"], "group": "g", "backend": {"url": "http://localhost:1"}, "batch": {"max_records": 900}}


def test_budgets_are_divided_and_names_differ() -> None:
    """No batch is larger than what fits into memory; the console runs once."""
    identity = {"properties": {"group.instance.id": "me"}}
    given = {
        "http": {"max_connections": 10, "management": {}},
        "producer": {"max_pending_bytes": 301},
        "security": {"requests_per_second": 1.5, "max_in_flight": 2},
        "active_consumers": {"max_instances": 7, "total_bytes": 2**20},
        "reactive_consumers": {
            "p": {**PUSH, "consumer": identity, "flow": {"max_records": 1000, "max_bytes": 600_000}}
        },
        "console": {},
    }
    config = pickle.loads(pickle.dumps(WholeFile.model_validate(given)))
    urls = tuple(f"http://127.0.0.1:{number}" for number in (1, 2, 3))
    first, second, _ = (ProcessShare(number, urls, "s" * 40, 80, 81, 0.0).of(config) for number in range(3))
    push = second.reactive_consumers["p"]
    assert (second.http.max_connections, second.http.port, second.http.management.port) == (3, 80, 81)
    assert (second.producer.max_pending_bytes, second.security.requests_per_second) == (100, 0.5)
    assert (second.security.max_in_flight, second.active_consumers.max_instances) == (1, 2)
    assert (second.active_consumers.total_bytes, push.flow.max_records, push.flow.max_bytes) == (2**20, 900, 200_000)
    assert (second.cluster.url, second.cluster.peers) == (urls[1], [*urls])
    assert push.consumer.properties["group.instance.id"] == "me-1"
    assert first.producer.transactions.id != second.producer.transactions.id
    assert [bool(one.section(ConsoleSections).console) for one in (first, second)] == [True, False]


def test_metrics_of_processes_are_joined_by_family() -> None:
    """Each family has one head; a process that is down is not ready."""
    head = b"# HELP headrace_ready h\n# TYPE headrace_ready gauge\n"
    text = head + b'headrace_ready 1.0\n# HELP a_total h\na_total{x="} {"} 2.0\n'
    assert joined_metrics({1: text, 0: text, 2: b""}).decode().splitlines() == [
        *head.decode().splitlines(),
        *(f'headrace_ready{{process="{number}"}} {ready}' for number, ready in ((0, 1.0), (1, 1.0), (2, 0.0))),
        "# HELP a_total h",
        *(f'a_total{{process="{number}",x="}} {{"}} 2.0' for number in (0, 1)),
    ]
