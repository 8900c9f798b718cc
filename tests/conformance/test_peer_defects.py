"""Defects that were found in other HTTP gateways to Kafka are not in this one."""

from __future__ import annotations

from active_client import Instance, offsets_of, write
from headrace_devkit.testing.scenario import Scenario


def test_a_byte_limit_keeps_the_rest_of_what_was_fetched(url: str, site: Scenario, source: str) -> None:
    write(site, source, *[b'"%s"' % (b"x" * 1998)] * 20)
    instance = Instance(url, source).subscribe(source)
    reads = [offsets_of(instance.first("&max_bytes=6100")) for _ in range(7)]
    assert reads == [[n for n in range(first, first + 3) if n < 20] for first in range(0, 20, 3)]


def test_a_read_answers_when_a_record_is_there(url: str, site: Scenario, source: str) -> None:
    """The client gives up long before the wait of its read ends, whether the record was there before or arrives."""
    instance = Instance(url, source).subscribe(source)
    for number in range(2):
        if not number:
            write(site, source, b"0")
        read = instance.open(query="?timeout=30000")
        read.socket.settimeout(20)
        if number:
            instance.wait_reading()
            write(site, source, b"1")
        assert b'"offset":%d,' % number in read.until(lambda data: data.endswith(b"}]"))
        read.socket.close()  # not cut: a reset takes the delivery back


def test_a_record_above_every_limit_is_delivered(url: str, site: Scenario, source: str) -> None:
    """Also one above what an instance may buffer."""
    write(site, source, b"1", b'"%s"' % (b"x" * 900_000), b"2")
    instance = Instance(url, source, responseMinBytes=1).subscribe(source)
    assert [offsets_of(instance.first("&max_bytes=10")) for _ in range(3)] == [[0], [1], [2]]


def test_overlapping_reads_are_refused_and_harm_nothing(url: str, site: Scenario, source: str) -> None:
    instance = Instance(url, source).subscribe(source)
    waiting = instance.open(query="?timeout=30000")
    instance.wait_reading()
    others = [instance.open(query="?timeout=30000") for _ in range(20)]
    for other in others:
        assert other.until(lambda data: b"\r\n\r\n" in data).startswith(b"HTTP/1.1 409")
        other.cut()
    write(site, source, b"1")
    assert b'"offset":0,' in waiting.until(lambda data: data.endswith(b"}]"))
    waiting.socket.close()  # not cut: a reset takes the delivery back
    instance.ok("POST", "/offsets")
    assert site.committed(source) == {(source, 0): 1}
