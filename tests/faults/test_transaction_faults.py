"""Transactions and idempotency keys while processes and brokers fail: all or nothing, and once."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import threading
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.transactions.transactional_client import BROKEN, TransactionalClient, transactional_properties
from headrace.kafka.write_request import UNCOUNTED, WriteRequest
from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import Cluster, StartHeadrace
from headrace_devkit.testing.proxy import END_TRANSACTION, OFFSETS_IN_TRANSACTION, PRODUCE, FaultProxy
from tests.active_client import send
from tests.faults.function_scenario import children
from tests.faults.ledger import Ledger

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

CLIENTS = 4


def post(url: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Return status and body of a response; status 0 if there was none."""
    try:
        return send("POST", url, body, {"Idempotency-Key": key} if key else {})
    except (OSError, ValueError, http.client.HTTPException):
        return 0, None


def ids_in(ledger: Ledger, topic: str) -> dict[int, tuple[int, int]]:
    """Return where each id is; one that is there twice fails."""
    places = [(json.loads(record.value or b""), (record.partition, record.offset)) for record in ledger.records(topic)]
    assert not [number for number, count in collections.Counter(n for n, _ in places).items() if count > 1]
    return dict(places)


@pytest.mark.parametrize(
    ("kills", "processes"), [(3, 2), *(pytest.param(10, count, marks=pytest.mark.long) for count in (1, 2))]
)
def test_a_key_writes_once_though_the_process_is_killed(
    ledger: Ledger, headrace: StartHeadrace, kills: int, processes: int
) -> None:
    """SIGKILL at a random moment, the same key sent again until it is answered: one record, where the response says."""
    name = ledger.new_topic(3)
    keys = {"producer": {"idempotency": {"topic": f"{name}-keys"}}}
    process = headrace({**ledger.config, **keys, "processes": processes})
    moments, responses, numbers = random.Random(), {}, itertools.count()

    def send(number: int) -> None:
        status, body = post(f"{process.url}/producers/{name}", {"records": [{"value": number}]}, f"key-{number}")
        if status == 200:
            responses[number] = body["offsets"][0]

    def send_until_answered(number: int) -> None:
        ledger.wait_until(lambda: send(number) or number in responses, f"a response to key {number}")

    send_until_answered(next(numbers))
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        for _ in range(kills):
            wave = list(itertools.islice(numbers, CLIENTS))
            sent = [clients.submit(send, number) for number in wave]
            threading.Event().wait(moments.uniform(0, 0.06))
            if processes > 1:
                ledger.wait_until(lambda: children(process), "a process that can be killed")
            victims = [process.server.id.pid] if processes == 1 else children(process)
            os.kill(moments.choice(victims), signal.SIGKILL)
            concurrent.futures.wait(sent)
            if processes == 1:
                process.kill()
                process.start()
                process.wait_ready()
            list(clients.map(send_until_answered, wave))
    ledger.wait_until(lambda: len(ledger.records(name)) >= len(responses), "the last commit to be visible")
    places = {number: (entry["partition"], entry["offset"]) for number, entry in responses.items()}
    assert len(places) == 1 + kills * CLIENTS
    assert ids_in(ledger, name) == places
    # One that starts still would end by the signal.
    ledger.wait_until(lambda: not ledger.reasons(process.url), "all processes to be ready")
    assert process.terminate() == 0


@pytest.mark.parametrize("fault", [pytest.param("paused", marks=pytest.mark.long), "killed"])
def test_transactions_are_whole_though_brokers_fail(
    kafka_three: Cluster, ledger: Ledger, headrace: StartHeadrace, fault: str
) -> None:
    """What was answered is true at read_committed in both topics; one that was in doubt for long is replaced."""
    first, second = ledger.new_topic(3), ledger.new_topic(3)
    process = headrace(ledger.config)
    responses: dict[int, str] = {}
    numbers, stop = itertools.count(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            number = next(numbers)
            parts = [{"topic": name, "records": [{"value": number}]} for name in (first, second)]
            status, body = post(f"{process.url}/transactions", {"topics": parts})
            outcomes = {
                entry.get("outcome", "ok") for part in (body or {}).get("topics", []) for entry in part["offsets"]
            }
            assert len(outcomes) <= 1
            responses[number] = outcomes.pop() if outcomes else {0: "unknown", 504: "unknown"}.get(status, "fail")
            stop.wait(0.01)

    def more(count: int) -> None:
        wanted = sum(outcome == "ok" for outcome in list(responses.values())) + count
        ledger.wait_until(lambda: sum(o == "ok" for o in list(responses.values())) >= wanted, "committed transactions")

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(run) for _ in range(CLIENTS)]
        try:
            more(20)
            if fault == "killed":
                with ledger.killed(random.choice((1, 2, 3))):
                    more(10)
            else:
                with ledger.paused(1, 2, 3):
                    stop.wait(5)
                # A broker that is killed may hit no transaction at all, one that stands still for 5 s hits them all.
                ledger.wait_until(lambda: " is replaced: " in process.output, "the replacement of a producer")
            more(20)
        finally:
            stop.set()
            for client in running:
                client.result(150)
    ok, failed = ({n for n, outcome in responses.items() if outcome == wanted} for wanted in ("ok", "fail"))
    ledger.wait_until(lambda: ok <= set(ids_in(ledger, first)) & set(ids_in(ledger, second)), "the last commits")
    # One whose outcome is unknown may be committed between two looks.
    ledger.wait_until(lambda: set(ids_in(ledger, first)) == set(ids_in(ledger, second)), "whole transactions")
    assert not failed & set(ids_in(ledger, first))


@pytest.mark.parametrize(
    "is_guarded", [pytest.param(True, id="guard"), pytest.param(False, id="no-guard", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("late", "is_committed", "harm"),
    [
        (PRODUCE, True, ([1, 2, 3], 3)),  # none: the broker knows its sequence number
        (OFFSETS_IN_TRANSACTION, True, ([1, 2, 3], 2)),
        (END_TRANSACTION, False, ([1, 2, 3], 3)),
    ],
    ids=["produce", "offsets", "end"],
)
def test_a_request_that_arrives_in_the_next_transaction(
    kafka_three: Cluster,
    kafka_network: FaultProxy,
    ledger: Ledger,
    late: int,
    is_committed: bool,
    harm: Any,
    is_guarded: bool,
) -> None:
    """A request of transaction 2 is sent again, and its first try arrives in 3. Without the guard 2's end commits 3,
    which is then aborted, and 2's offsets replace those of 3.
    """
    topic = ledger.new_topic()
    kafka = KafkaConfig(bootstrap_servers=kafka_network.bootstrap_servers)
    properties = transactional_properties(kafka, ProducerConfig(), f"{topic}-id", 60)
    member = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"{topic}-group"})
    client = TransactionalClient(kafka, properties, 30)

    def write(number: int) -> TransactionalClient:
        used = client
        assert used.has_statistics()
        if used.problem() and is_guarded:
            used.close()
            used = TransactionalClient(kafka, properties, 30)
            assert used.has_statistics()
        used.begin()
        record = OutgoingRecord(topic, None, b"%d" % number)
        request = WriteRequest([record], UNCOUNTED, lambda request: None, None, [None])
        assert not used.write(request, lambda: False)
        used.flush(lambda: False)
        offset = confluent_kafka.TopicPartition(topic, 0, number)
        used.send_offsets([offset], member.consumer_group_metadata())
        return used

    write(1).commit()
    kafka_network.delay(late)
    write(2).commit()
    last = write(3)
    kafka_network.deliver()
    with contextlib.suppress(*BROKEN):
        last.commit() if is_committed else last.producer.transact("abort_transaction", 30)
    last.close()
    expected = harm if not is_guarded else ([1, 2, 3], 3) if is_committed else ([1, 2], 2)

    def found() -> Any:
        return sorted(ids_in(ledger, topic)), ledger.committed(f"{topic}-group")[TopicPartition(topic, 0)]

    ledger.wait_until(lambda: found() == expected, f"{expected}, not {found()}")
    member.close()
