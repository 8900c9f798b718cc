"""A partition that takes nothing: its own requests are refused, and the others go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headrace_devkit.testing import Cluster, StartHeadrace
from headrace_devkit.testing.scenario import JsonResponse, Scenario

PENDING_BYTES = 1_000_000
BODY_BYTES = 50_000
AT_ONCE = 12  # twelve times 50 kB is three times a fifth of the budget


def post(url: str, topic: str, partition: int, number: int) -> JsonResponse:
    record = {"value": [number, "x" * BODY_BYTES], "partition": partition}
    return Scenario.ask(f"{url}/producers/{topic}", {"records": [record]}, 240)


def wait_for_refusals(sent: list[Future[JsonResponse]]) -> None:
    """Wait until two thirds of several requests were answered, and see that none of those was taken."""
    end = time.monotonic() + 120
    while 3 * sum(one.done() for one in sent) < 2 * len(sent):
        assert time.monotonic() < end, "too few requests were refused"
        time.sleep(0.01)
    for one in sent:
        if one.done():
            response = one.result()
            assert (response.status, response.body["code"]) == (503, "ERR40016"), response
            assert "retry-after" in response.headers
            assert "partition 0 of topic" in response.body["description"]


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether or not anybody has asked for its exit code."""
    end = time.monotonic() + 120
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, "the broker does not end"
            time.sleep(0.05)


def served_while_stuck(pool: ThreadPoolExecutor, url: str, stuck: str, live: str) -> list[Future[JsonResponse]]:
    """Ask for more than partition 0 may hold, see that the others go on meanwhile, and return what was sent."""
    sent = [pool.submit(post, url, stuck, 0, number) for number in range(AT_ONCE)]
    wait_for_refusals(sent)
    sent.append(pool.submit(post, url, stuck, 1, AT_ONCE))  # its lane has room
    for number in range(20):
        assert post(url, live, number % 2, number).status == 200
    return sent


def test_a_partition_without_enough_replicas_refuses_alone(
    kafka_three: Cluster, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """503 at once for it alone, the rest is served meanwhile, and what was taken is written when the broker is back."""
    stuck, live = f"stuck-{time.time_ns()}", f"live-{time.time_ns()}"
    kafka_three.create_topic(stuck, 2, {"min.insync.replicas": "3"})
    kafka_three.create_topic(live, 2, {"min.insync.replicas": "2"})
    producer = {"max_pending_bytes": PENDING_BYTES, "properties": {"delivery.timeout.ms": 180_000}}
    scenario = Scenario(kafka_three.bootstrap_servers, tmp_path)
    url = headrace({**scenario.config, "producer": producer}).url
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        # It hands its partitions over first: killed, it would hold up every topic until it is missed.
        pid = next(broker["pid"] for broker in kafka_three.endpoints if broker["id"] == 3)
        os.kill(pid, signal.SIGTERM)
        try:
            wait_for_end(pid)
            sent = served_while_stuck(pool, url, stuck, live)
            waiting = [number for number, one in enumerate(sent) if not one.done()]
        finally:
            kafka_three.restart(3)
            kafka_three.wait_in_sync()
        taken = [number for number, one in enumerate(sent) if one.result().status == 200]
    assert set(taken) <= set(waiting)
    assert len(taken) >= 3
    assert AT_ONCE in taken
    for topic, numbers in ((stuck, taken), (live, list(range(20)))):
        assert sorted(json.loads(record.value)[0] for record in scenario.records(topic)) == numbers
