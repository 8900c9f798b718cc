"""Transactions and idempotency keys while processes and brokers fail: all or nothing, and once."""

from __future__ import annotations

import collections
import concurrent.futures
import http.client
import itertools
import json
import random
import threading
import urllib.error
import urllib.request
import uuid
from typing import Any

import pytest

KILLS = 10
CLIENTS = 4


def post(url: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Return status and body of an answer; status 0 if there was none."""
    headers = {"Content-Type": "application/json", **({"Idempotency-Key": key} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, json.load(answer)
    except (OSError, ValueError, http.client.HTTPException):
        return 0, None


def ids_in(ledger: Any, topic: str) -> dict[int, tuple[int, int]]:
    """Return where each id is; one that is there twice fails."""
    places = [(json.loads(record.value), (record.partition, record.offset)) for record in ledger.records(topic)]
    assert not [number for number, count in collections.Counter(n for n, _ in places).items() if count > 1]
    return dict(places)


@pytest.mark.heavy
@pytest.mark.timeout(500)
def test_a_key_writes_once_though_the_process_is_killed(kafka: Any, topic: Any, headrace: Any, bed: Any) -> None:
    """SIGKILL at a random moment, the same key sent again until it is answered: one record, where the answer says."""
    name, keys = topic(3), f"keys-{uuid.uuid4().hex[:8]}"
    settings = {"producer": {"idempotency": {"topic": keys}}}
    process = headrace({"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, **settings})
    moments, answers, numbers = random.Random(), {}, itertools.count()

    def send(number: int) -> None:
        status, body = post(f"{process.url}/producers/{name}", {"records": [{"value": number}]}, f"key-{number}")
        if status == 200:
            answers[number] = body["offsets"][0]

    def send_until_answered(number: int) -> None:
        bed.wait_until(lambda: send(number) or number in answers, 60, f"an answer to key {number}")

    send_until_answered(next(numbers))
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        for _ in range(KILLS):
            wave = list(itertools.islice(numbers, CLIENTS))
            sent = [clients.submit(send, number) for number in wave]
            threading.Event().wait(moments.uniform(0, 0.06))
            process.kill()
            concurrent.futures.wait(sent)
            process.start()
            process.wait_ready()
            list(clients.map(send_until_answered, wave))
    ledger = bed.Ledger(kafka.bootstrap_servers)
    bed.wait_until(lambda: len(ledger.records(name)) >= len(answers), 30, "the last commit to be visible")
    places = {number: (entry["partition"], entry["offset"]) for number, entry in answers.items()}
    assert len(places) == 1 + KILLS * CLIENTS
    assert ids_in(ledger, name) == places


@pytest.mark.heavy
@pytest.mark.timeout(500)
@pytest.mark.parametrize("fault", [pytest.param("paused", marks=pytest.mark.long), "killed"])
def test_transactions_are_whole_though_brokers_fail(kafka_three: Any, headrace: Any, bed: Any, fault: str) -> None:
    """What was answered is true at read_committed in both topics; one that was in doubt for long is replaced."""
    first, second = (f"tx-{uuid.uuid4().hex[:8]}" for _ in range(2))
    for name in (first, second):
        kafka_three.create_topic(name, 3, {"min.insync.replicas": "2"})
    process = headrace({"kafka": {"bootstrap_servers": kafka_three.bootstrap_servers}})
    answers: dict[int, str] = {}
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
            answers[number] = outcomes.pop() if outcomes else {0: "unknown", 504: "unknown"}.get(status, "fail")
            stop.wait(0.01)

    def more(count: int) -> None:
        wanted = sum(outcome == "ok" for outcome in list(answers.values())) + count
        bed.wait_until(lambda: sum(o == "ok" for o in list(answers.values())) >= wanted, 60, "committed transactions")

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(run) for _ in range(CLIENTS)]
        try:
            more(20)
            if fault == "killed":
                broker = random.choice((1, 2, 3))
                kafka_three.kill(broker)
                more(10)
                kafka_three.restart(broker)
                kafka_three.wait_in_sync()
            else:
                for broker in (1, 2, 3):
                    kafka_three.pause(broker)
                stop.wait(5)
                for broker in (1, 2, 3):
                    kafka_three.resume(broker)
                # A broker that is killed may hit no transaction at all, one that stands still for 5 s hits them all.
                bed.wait_until(lambda: " is replaced: " in process.output, 60, "the replacement of a producer")
                kafka_three.wait_in_sync()
            more(20)
        finally:
            stop.set()
            for client in running:
                client.result(150)
    ledger = bed.Ledger(kafka_three.bootstrap_servers)
    ok, failed = ({n for n, outcome in answers.items() if outcome == wanted} for wanted in ("ok", "fail"))
    bed.wait_until(lambda: ok <= set(ids_in(ledger, first)) & set(ids_in(ledger, second)), 30, "the last commits")
    # One whose outcome is unknown may be committed between two looks.
    bed.wait_until(lambda: set(ids_in(ledger, first)) == set(ids_in(ledger, second)), 30, "whole transactions")
    assert not failed & set(ids_in(ledger, first))
