"""Active consumers whose clients are slow, leave, come back with old ids, send what Kafka refuses, or never read."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from active_client import Instance, offsets_of, send, write
from headrace_devkit.testing import HeadraceProcess, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
CLOSE = {"Connection": "close"}


@pytest.fixture
def process(site: Scenario, headrace: StartHeadrace) -> HeadraceProcess:
    return headrace(site.config)


def test_json_of_several_lines_is_one_line_of_a_stream(url: str, site: Scenario, source: str) -> None:
    write(site, source, b'{\n  "a":\r\n [1,\n\n2]}', b'"\\n"')
    instance = Instance(url, source).subscribe(source)
    stream = instance.open(EVENTS)
    assert [data["value"] for _, data in stream.events(2)] == [{"a": [1, 2]}, "\n"]
    stream.cut()
    instance.ok("POST", "/positions/first", {})
    stream = instance.open(LINES)
    stream.until(lambda data: data.count(b'"offset"') == 2)
    lines = [json.loads(line) for line in stream.text.split("\n") if line]
    assert [line["value"] for line in lines] == [{"a": [1, 2]}, "\n"]
    stream.cut()


def test_a_stream_resumes_exactly_also_where_its_client_has_received_nothing(
    url: str, site: Scenario, source: str
) -> None:
    """The records of the second partition are sent behind the event that the client has read last."""
    write(site, source, b"0", b"1")
    instance = Instance(url, source).subscribe(source)
    stream = instance.open(EVENTS)
    (first, _), *_ = stream.events(2)
    write(site, source, b"0", b"1", b"2", partition=1)
    stream.events(5)
    stream.cut()
    again = instance.open(EVENTS, Last_Event_ID=first)
    found = [data for _, data in again.events(4)]
    assert (offsets_of(found), offsets_of(found, 1)) == ([1], [0, 1, 2])
    again.cut()
    again = instance.open(EVENTS, Last_Event_ID="{}")  # the id with which the stream before began
    found = [data for _, data in again.events(4)]
    assert (offsets_of(found), offsets_of(found, 1)) == ([1], [0, 1, 2])
    again.cut()


def test_what_goes_out_on_a_stream_is_delivered_when_it_is_named(url: str, site: Scenario, source: str) -> None:
    """Not by auto commit, and not by a commit without a body, unless the client takes the risk."""
    write(site, source, *[b"%d" % n for n in range(5)])
    auto = Instance(url, f"{source}-auto", autoCommitEnable=True).subscribe(source)
    refused = send("GET", f"{auto.url}/records", headers={"Accept": EVENTS})
    assert (refused.status, refused.code) == (409, "ERR40066")
    stream = auto.open(EVENTS, "?delivery=at_most_once")
    assert len(stream.events(5)) == 5
    stream.cut()
    instance = Instance(url, source).subscribe(source)
    stream = instance.open(LINES)
    stream.until(lambda data: data.count(b'"offset"') == 5)
    stream.cut()
    assert instance("POST", "/offsets").code == "ERR40066"
    stream = instance.open(EVENTS, "?ack=" + quote(json.dumps({source: {0: 2}})))
    assert offsets_of([data for _, data in stream.events(3)]) == [2, 3, 4]
    stream.cut()
    place = {"topic": source, "partition": 0, "metadata": ""}
    instance.ok("POST", "/offsets", {"offsets": [{**place, "offset": 2}]})
    assert offsets_of(instance.read(2)) == [3, 4]
    assert instance.ok("POST", "/offsets") == [{**place, "offset": 5}]
    assert instance("POST", "/offsets", {"offsets": [{**place, "offset": 1}]}).code == "ERR12207"


@pytest.mark.parametrize("forged", ['{"t":{"0":1e30}}', '{"t":{"-1":0}}', "x", '{"t":9}'])
def test_a_forged_id_of_an_event_is_refused(url: str, source: str, forged: str) -> None:
    instance = Instance(url, source).subscribe(source)
    response = send(
        "GET",
        f"{instance.url}/records",
        headers={"Accept": EVENTS, "Last-Event-ID": forged.replace('"t"', f'"{source}"')},
    )
    assert response.status == 400
    assert instance.ok("GET", "/records") == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/offsets", {"offsets": [{"partition": 0, "offset": 0, "metadata": "a\0b"}]}),
        ("POST", "/offsets", {"offsets": [{"partition": 2**31, "offset": 0}]}),
        ("POST", "/offsets", {"offsets": [{"partition": 0, "offset": 2**63}]}),
        ("POST", "/positions", {"offsets": [{"partition": 0, "offset": -1}]}),
        ("POST", "/positions", {"offsets": [{"topic": "a\0b", "partition": 0, "offset": 1}]}),
        ("POST", "/positions", {"timestamps": [{"partition": 0, "timestamp": "\n"}]}),
        ("POST", "/subscriptions", {"topics": ["a\0b"]}),
        ("POST", "/subscriptions", {"topics": ["^.*"]}),
        ("POST", "/assignments", {"partitions": [{"topic": "\x1b[31m", "partition": 0}]}),
    ],
)
def test_what_kafka_cannot_take_is_refused_and_the_instance_lives(
    url: str, site: Scenario, source: str, method: str, path: str, body: Any
) -> None:
    instance = Instance(url, source).subscribe(source)
    entries = {
        name: [{"topic": source, **one} if isinstance(one, dict) else one for one in given]
        for name, given in body.items()
    }
    assert instance(method, path, entries).status == 400
    write(site, source, b"1")
    assert offsets_of(instance.first()) == [0]


def test_the_end_of_the_process_ends_reads_and_streams(process: HeadraceProcess, site: Scenario, source: str) -> None:
    """At once and with whole responses; nothing is committed that no client has confirmed."""
    write(site, source, b"0")
    reading = Instance(process.url, source, requestWaitMs=30_000, autoCommitEnable=True).subscribe(source)
    assert offsets_of(reading.first()) == [0]
    streaming = Instance(process.url, f"{source}-stream").subscribe(source)
    stream, waiting = streaming.open(EVENTS), reading.open()
    stream.events(1)
    reading.wait_reading()
    process.server.signal(signal.SIGTERM)
    assert waiting.until(lambda data: data.endswith(b"[]")).startswith(b"HTTP/1.1 200")
    assert stream.rest().endswith(b"0\r\n\r\n")
    Scenario.wait_until(lambda: process.exit_code is not None, "the end")
    assert process.exit_code == 0
    assert site.committed(f"{source}-stream") == {}
    waiting.cut()
    stream.cut()


@pytest.mark.parametrize(
    ("size", "receives", "headers", "auto"),
    [(20_000, 4096, {}, False), (20_000, 4096, CLOSE, True), (1000, 0, {}, True), (1000, 0, CLOSE, False)],
    ids=["not-written-explicit", "not-written-auto", "written-auto", "written-explicit"],
)
def test_a_response_that_is_cut_is_read_again(
    url: str, site: Scenario, source: str, size: int, receives: int, headers: Any, auto: bool
) -> None:
    """It is larger than all buffers between the two, or the system of its client has all of it, and it has not."""
    values = [b"\x01" * size] * 90  # six times as long in JSON
    write(site, source, *values)
    instance = Instance(url, source, format="string", autoCommitEnable=auto).subscribe(source)
    limit = "?timeout=20000&max_bytes=2000000"
    for _ in range(3):
        cut = instance.open(query=limit, receive_bytes=receives, **headers)
        cut.until(lambda data: len(data) > 10_000)
        cut.socket.close()
        assert auto or instance.ok("POST", "/offsets") == []
    records: list[Any] = []
    while len(records) < 90:
        records += instance.first("&max_bytes=2000000")
    assert offsets_of(records) == list(range(90))
    place = {"topic": source, "partition": 0, "offset": 90, "metadata": ""}
    assert auto or instance.ok("POST", "/offsets") == [place]
    instance.ok("DELETE")
    assert auto or site.committed(source) == {(source, 0): 90}


def test_a_reader_that_left_frees_its_instance_at_once(url: str, source: str) -> None:
    instance = Instance(url, source, requestWaitMs=30_000).subscribe(source)
    for accept in ("*/*", EVENTS, LINES):
        waiting = instance.open(accept)
        instance.wait_reading()
        waiting.cut()
        Scenario.wait_until(lambda: instance("GET", "/records?timeout=1").status == 200, "the instance to be free")
    assert instance.ok("GET", "/records?timeout=1") == []


def test_a_client_that_never_reads_its_stream_holds_little(
    process: HeadraceProcess, site: Scenario, source: str
) -> None:
    """The buffer is bounded, others read meanwhile, and nothing that waits is committed."""
    values = [b'"%s"' % (b"x" * 1000)] * 8000
    write(site, source, *values)
    stuck = Instance(process.url, source).subscribe(source)
    stream = stuck.open(EVENTS, receive_bytes=4096)
    other = Instance(process.url, f"{source}-other").subscribe(source)
    assert len(other.read(8000, "&max_bytes=2000000")) == 8000
    gauge = next(
        line
        for line in site.ask(f"{process.url}/metrics").body.splitlines()
        if line.startswith("headrace_active_buffered_bytes ")
    )
    assert float(gauge.split()[-1]) <= 2 * 2_097_152
    stream.cut()
    assert site.committed(source) == {}


def test_instances_in_a_loop_leave_nothing_behind(process: HeadraceProcess, site: Scenario, source: str) -> None:
    """Threads and file descriptors are those of before; the pool for blocking calls may still grow by its size."""
    folder = Path(f"/proc/{process.server.id.pid}")

    def counted() -> tuple[int, int]:
        return len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))

    def live(number: int) -> None:
        instance = Instance(process.url, f"{source}-{number % 3}")
        instance.ok("POST", "/subscriptions", {"topics": [source]})
        instance.ok("GET", "/records?timeout=50")
        if number % 2:
            instance.ok("DELETE", "/subscriptions")
        instance.ok("DELETE")

    def live_at_a_time(rounds: int) -> None:
        for _ in range(rounds):
            threads = [threading.Thread(target=live, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    live_at_a_time(3)
    before = counted()
    live_at_a_time(3)  # 24 instances: one thread left behind by each is more than the pool
    Scenario.wait_until(
        lambda: all(now <= then + more for now, then, more in zip(counted(), before, (16, 3), strict=True)),
        f"{counted()} of {before}",
    )
    shown = send("GET", f"{process.url}/adm/consumers").body["consumers"]
    assert [one for one in shown if one["group"].startswith(source)] == []
