"""A function with a Kafka trigger and an HTTP trigger, on a real broker."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file
from yaml_table import table

HANDLER = table(__file__, "handler")


@pytest.mark.parametrize("allocator", ["shared", pytest.param("", marks=pytest.mark.long)])
def test_a_request_acknowledges_records_of_kafka(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path, allocator: str
) -> None:
    """The group commits what the request acknowledges and no more; SIGTERM lets a request in flight end."""
    source, seen = topic(), topic()
    group = f"{source}-collect"
    kafka = {"topics": [source], "consumerGroup": group, "workerAllocationMode": "static"}
    kafka["consumer"] = {"properties": {"auto.commit.interval.ms": 50}}
    own = {"workerAllocatorName": allocator}
    triggers = {
        "in": {"kind": "kafka-cluster", "numWorkers": 2, "explicitAckMode": "explicitOnly", "attributes": kafka, **own},
        "web": {"kind": "http", "attributes": {"port": 0}, **own},
    }
    file = function_file(tmp_path, HANDLER, triggers, name="collect")
    process = headrace({**site.config, "functions": [file]})
    url = re.findall(r"^ready http=\S+ collect\.web=(\S+)$", process.output, re.MULTILINE)[0]
    assert url.startswith("http://127.0.0.1:")
    site.write(source, *(OutgoingRecord(source, b"k", b"v%d" % n, None, 0) for n in range(10)))

    def acknowledge(offset: int, of: str = source) -> Any:
        return site.ask(f"{url}/done?seen={seen}", {"topic": of, "offset": offset})

    site.wait_until(lambda: acknowledge(4).status == 202, "the handler has been called for offset 4")
    site.wait_committed(group, source, 5)
    refused = acknowledge(4, "elsewhere")
    assert (refused.status, "no trigger of collect reads elsewhere" in refused.body) == (409, True)
    assert acknowledge(10).status == 409  # no such record was delivered
    assert acknowledge(8).body == {"acknowledged": 8}
    site.wait_committed(group, source, 9)
    written = site.records(seen)
    assert written and all(record.value.startswith(b'{"topic"') for record in written)
    assert site.ask(f"{url}/__internal/health").status == 200
    page = str(site.ask(f"{process.url}/metrics").body)
    assert re.search(r'handled_events_total{[^}]*result="success"[^}]*trigger_id="web"[^}]*} [1-9]', page)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(site.ask, f"{url}/slow")
        site.wait_until((tmp_path / "begun").exists, "the slow request is at work")
        process.server.ask_to_stop()
        site.wait_until(lambda: site.ask(f"{url}/__internal/health").status == 503, "new requests are refused")
        assert acknowledge(9).status == 503
        (tmp_path / "go").touch()
        assert slow.result().body == "ended"
    site.wait_until(lambda: process.exit_code is not None, "the end of the process")
    assert process.exit_code == 0
    assert list(site.committed(group).values()) == [9]
    with pytest.raises(ConnectionError):
        site.ask(url)
    assert "Traceback" not in process.output
