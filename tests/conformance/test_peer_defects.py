"""The defects that were found in other HTTP gateways to Kafka, each as a test of this one.

| # | Where | Defect | Test |
|---|---|---|---|
| 1 | Karapace | a byte limit in a fetched block drops the rest of the block | `test_01` |
| 2 | Karapace | an undecodable record drops its block | `test_active_consumers.py`: \
`test_a_key_and_a_value_are_decoded_apart` |
| 3 | Karapace | null, 0, false and "" are written as an empty value | `test_produce_use_case.py`: \
`test_what_is_stored_of_a_request`; `test_strict_json.py`: `test_values_are_written_byte_for_byte` |
| 4 | Karapace | a read with records waits for nearly its whole time | `test_04` |
| 5 | Strimzi | a response above the limit moves the position and loses the batch | `test_12` |
| 6 | Strimzi | a record that is not JSON loses its batch | as 2 |
| 7 | Strimzi | a null value is the text null, or three bytes | as 2 |
| 8 | Strimzi | produce to an unknown topic stalls all requests | `test_produce_use_case.py`: \
`test_an_unknown_topic_is_refused_before_anything_is_sent` |
| 9 | Strimzi | limits of one read are those of all that run | `test_09` |
| 10 | Strimzi | `Accept` is compared as a whole | `test_10` |
| 11 | Confluent | a commit without a body commits what was cut off | `test_11` |
| 12 | Confluent | a record above the limit gives empty answers without end | `test_12` |
| 13 | Dapr | the next success skips a failed record | `test_delivery_machine.py`; `test_retry_policy.py` |
| 14 | Dapr | a dead letter that cannot be written is ignored | `test_attempts.py`: \
`test_a_failed_write_of_dead_letters_is_logged_once_and_repeats_no_other`; `test_dead_letter_faults.py` |
| 15 | Redpanda | overlapping reads crash the process | `test_15` |
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from active_client import Instance, offsets_of, send, write
from headrace_devkit.testing.scenario import Scenario

TESTS = Path(__file__).parents[1]


def test_01_a_byte_limit_keeps_the_rest_of_what_was_fetched(url: str, site: Scenario, source: str) -> None:
    write(site, source, *[b'"%s"' % (b"x" * 1998)] * 20)
    instance = Instance(url, source).subscribe(source)
    reads = [offsets_of(instance.first("&max_bytes=6100")) for _ in range(7)]
    assert reads == [[n for n in range(first, first + 3) if n < 20] for first in range(0, 20, 3)]


def test_04_a_read_answers_when_a_record_is_there(url: str, site: Scenario, source: str) -> None:
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


def test_09_reads_at_a_time_have_limits_of_their_own(url: str, site: Scenario, source: str) -> None:
    slow, quick = (Instance(url, who + source).subscribe(source) for who in ("slow-", "quick-"))
    waiting = slow.open(query="?timeout=30000&max_bytes=200000")
    slow.wait_reading()
    assert quick.ok("GET", "/records?timeout=1&max_bytes=1") == []
    write(site, source, b'"a"', b'"b"')
    assert len(quick.first("&max_bytes=1")) == 1
    assert b'"offset":0,' in waiting.until(lambda data: data.endswith(b"}]"))
    waiting.cut()


@pytest.mark.parametrize(
    "accept",
    ["*/*", "application/json; charset=utf-8", "application/*;q=0.8", "text/html, */*;q=0.1", "APPLICATION/JSON"],
)
def test_10_every_accept_that_allows_json_is_answered(url: str, source: str, accept: str) -> None:
    response = send("GET", f"{Instance(url, source).subscribe(source).url}/records", headers={"Accept": accept})
    assert (response.status, response.body) == (200, [])


def test_11_a_commit_without_a_body_ends_at_what_was_delivered(url: str, site: Scenario, source: str) -> None:
    write(site, source, *[b'"%s"' % (b"x" * 1998)] * 20)
    instance = Instance(url, source).subscribe(source)
    assert offsets_of(instance.first("&max_bytes=6100")) == [0, 1, 2]
    instance.ok("POST", "/offsets")
    instance.ok("DELETE")
    assert site.committed(source) == {(source, 0): 3}
    assert offsets_of(Instance(url, source).subscribe(source).read(17)) == list(range(3, 20))


def test_12_a_record_above_every_limit_is_delivered(url: str, site: Scenario, source: str) -> None:
    """Also one above what an instance may buffer."""
    write(site, source, b"1", b'"%s"' % (b"x" * 900_000), b"2")
    instance = Instance(url, source, responseMinBytes=1).subscribe(source)
    assert [offsets_of(instance.first("&max_bytes=10")) for _ in range(3)] == [[0], [1], [2]]


def test_15_overlapping_reads_are_refused_and_harm_nothing(url: str, site: Scenario, source: str) -> None:
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


def test_every_row_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*?$", __doc__ or "", re.MULTILINE)
    assert rows == [str(number) for number in range(1, 16)]
    own = {name for name in globals() if name.startswith("test_")}
    others = [*TESTS.glob("unit/**/*.py"), *TESTS.glob("conformance/*.py")]
    for name in re.findall(r"`(test_\w+)`", __doc__ or ""):
        elsewhere = any(f"def {name}(" in path.read_text() for path in others)
        assert elsewhere or any(one.startswith(name) for one in own), name
