"""Requests for transactions, and their responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace import errors
from headrace.config.producer_config import ProducerConfig
from headrace.records import OutgoingRecord
from headrace.sidecar.produce.produce import RequestIds
from headrace.sidecar.produce.produce_response import Prepared
from headrace.sidecar.produce.transactions import TransactionRequest, Transactions, parse_transaction
from yaml_table import table


class Kafka:
    """Prepares a record for each of a request, and ends transactions as it is told."""

    internal = None

    def __init__(self, *results: Any) -> None:
        self.results = results

    async def load(self, topic: str, wanted: Any, ids: RequestIds) -> Prepared:
        if topic == "bad":
            raise errors.EncodeError("record 0 does not fit", index=0)
        return Prepared([OutgoingRecord(topic, None, b"1") for _ in wanted.request.records], None, 7)

    def submit(self, records: Any, closing: Any = None, group: Any = None) -> asyncio.Future[list[Any]]:
        outcome = asyncio.get_running_loop().create_future()
        if self.results:
            outcome.set_result(list(self.results))
        return outcome


def request(**records: int) -> TransactionRequest:
    parts = [{"topic": topic, "records": [{"value": n} for n in range(count)]} for topic, count in records.items()]
    return parse_transaction(json.dumps({"topics": parts}).encode(), 100)


def write(wanted: TransactionRequest, *results: Any, seconds: float = 5.0, keyed: bool = False) -> Any:
    async def main() -> Any:
        kafka = Kafka(*results)
        settings = ProducerConfig(properties={"delivery.timeout.ms": 1000 * seconds, "linger.ms": 0})
        transactions = Transactions(settings, kafka, kafka)  # type: ignore[arg-type]
        work = await transactions.prepare(wanted, RequestIds())
        if keyed:
            work = work._replace(last_record=lambda results: OutgoingRecord("keys", None, b""))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        transactions.do(work, done.set_result)
        return transactions.respond(work, await done)

    return asyncio.run(main())


def test_what_is_at_fault_decides_the_status() -> None:
    """Not what happened to the records beside it; without a fault it is 503 and may be sent again."""
    aborted = errors.TransactionAborted()
    response = write(request(a=1, b=1), aborted, errors.RecordTooLarge())
    assert (response.status, response.retry_after_seconds, response.written_records) == (413, None, 0)
    response = write(request(a=1, b=1), aborted, aborted)
    body = json.loads(response.body)
    assert (response.status, response.retry_after_seconds, body["code"]) == (503, 1, "ERR40042")
    assert [part["offsets"][0]["outcome"] for part in body["topics"]] == ["fail", "fail"]


def test_an_error_names_the_topic_it_is_about() -> None:
    """An index alone would not do."""
    with pytest.raises(errors.EncodeError) as raised:
        write(request(a=1, bad=1))
    assert raised.value.parameters == {"index": 0, "topic": "bad"}


@pytest.mark.parametrize(
    ("body", "says"), [*table(__file__, "a_wrong_body"), ['{"%s":1}' % ("x" * 900_000), "unknown field `xxx"]]
)
def test_a_wrong_body_is_refused(body: str, says: str) -> None:
    """With what does not fit, and the nearest name for an unknown one; a misspelt value is no tombstone."""
    with pytest.raises(errors.InvalidRequest) as raised:
        parse_transaction(body.encode(), 100)
    assert says in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_transaction_of_empty_or_too_many_records_is_refused() -> None:
    """Records of all its topics count; one with neither key nor value would be a tombstone by accident."""
    with pytest.raises(errors.InvalidRequest):
        write(request(a=0))
    part = b'{"topic":"a","records":[' + b",".join([b'{"value":1}'] * 60) + b"]}"
    with pytest.raises(errors.TooManyRecords, match="more than 100 records"):
        parse_transaction(b'{"topics":[' + part + b"," + part + b"]}", 100)
    with pytest.raises(errors.InvalidRequest, match="record 0 has neither") as raised:
        parse_transaction(b'{"topics":[{"topic":"a","records":[{"partition":1}]}]}', 100)
    assert raised.value.parameters == {"index": 0, "topic": "a"}


def test_a_late_outcome_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """504 for all of it, and no topic says OK; only with a key the same request may be sent again."""
    monkeypatch.setattr("headrace.sidecar.produce.transactions._GRACE_SECONDS", 0)
    for keyed, advice in ((False, "read the topic"), (True, "same Idempotency-Key")):
        response = write(request(a=1, b=1), seconds=0.1, keyed=keyed)
        body = json.loads(response.body)
        outcomes = [part["offsets"][0]["outcome"] for part in body["topics"]]
        assert (response.status, outcomes) == (504, ["unknown", "unknown"])
        assert "requestStatus" not in body["topics"][0]
        assert (body["metadata"]["retriable"], advice in body["description"]) == (keyed, True)
