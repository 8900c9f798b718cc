"""What Kafka refuses for a moment: it is tried again, and nothing ends because of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError

from headrace.config.kafka import KafkaConfig
from headrace.errors import FatalKafkaError, HeadraceError, KafkaUnauthorized, KafkaUnavailable
from headrace.kafka import Admin, poll_thread
from headrace.kafka.positions import ReadPolicy
from headrace.records import Record, TopicPartition
from tests.assigned_consumer import AssignedConsumer
from tests.group_member import P0, Member, with_member


class Leader:
    """An administrative client that reports one code after the other, and then offset 7."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def __len__(self) -> int:
        return 0

    def poll(self, seconds: float) -> int:
        return 0

    def list_topics(self, **_: Any) -> None:
        raise confluent_kafka.KafkaException(KafkaError(KafkaError._TRANSPORT))

    def list_offsets(self, specs: dict[Any, Any], **_: Any) -> dict[Any, Future[Any]]:
        response: Future[Any] = Future()
        if self.codes:
            response.set_exception(confluent_kafka.KafkaException(KafkaError(self.codes.pop(0))))
        else:
            response.set_result(SimpleNamespace(offset=7))
        return dict.fromkeys(specs, response)


def admin_of(leader: Leader, *, responses: bool, limit_seconds: float = 10) -> Admin:
    admin = Admin(KafkaConfig(request_timeout_seconds=limit_seconds))
    admin._client = leader  # type: ignore[assignment]
    if responses:
        admin.reachability.answered()
    return admin


def test_offsets_are_asked_for_until_the_leader_responses() -> None:
    leader = Leader(KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TRANSPORT, KafkaError.NOT_LEADER_FOR_PARTITION)
    assert asyncio.run(admin_of(leader, responses=True).end_offsets([P0])) == {P0: 7}


@pytest.mark.parametrize(("responses", "least", "most"), [(True, 1, 998), (False, 1000, 1000)])
def test_offsets_are_asked_for_until_the_limit_and_once_while_no_broker_responses(
    responses: bool, least: int, most: int
) -> None:
    leader = Leader(*[KafkaError.LEADER_NOT_AVAILABLE] * 1000)
    with pytest.raises(KafkaUnavailable):
        asyncio.run(admin_of(leader, responses=responses, limit_seconds=1).end_offsets([P0]))
    assert least <= len(leader.codes) <= most


def fatal(client: AssignedConsumer, cause: int) -> None:
    """Return an error from a client after which it does nothing more; its text names the cause."""
    text = f"Fatal error: {KafkaError(cause).str()}: ConsumerGroupHeartbeat fatal error"
    client.problem(KafkaError(KafkaError._FATAL, text))


def test_a_member_that_kafka_refuses_for_a_moment_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With KIP-848 a refusal is fatal to the client, so a new one takes its part."""
    monkeypatch.setattr(poll_thread, "_REFUSED_SECONDS", 0.01)

    async def test(member: Member) -> None:
        client, heard = member.client, member.listener
        member.assign(P0)
        member.append(P0)
        await member.until(lambda: heard.records, "a record")
        fatal(client, KafkaError.GROUP_AUTHORIZATION_FAILED)
        await member.until(lambda: member.clients not in ([], [client]), "another client")
        await member.until(lambda: "no right Read on group g" in member.consumer.trouble(P0), "the words")
        member.assign(P0)
        member.append(P0)
        await member.until(lambda: heard.records[-1] == (P0, heard.epochs[P0], 1), "a record of the new client")
        await member.turns()
        assert (len(member.clients), len(heard.assigned), member.consumer.trouble(P0)) == (1, 2, "")

    with_member(test)


def test_a_listener_that_fails_ends_its_member() -> None:
    """What the listener missed must not be passed by what comes after it: nothing more is handed over or committed."""

    async def test(member: Member) -> None:
        handed: list[int] = []

        def fail(partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
            handed.extend(record.offset for record in records)
            raise ZeroDivisionError

        member.listener.on_records = fail
        member.append(P0)
        member.assign(P0)
        await member.until(lambda: handed, "a record")
        member.append(P0)
        with pytest.raises(AssertionError):
            await member.until(lambda: False, "the end of the member")
        assert isinstance(member.consumer.death, ZeroDivisionError)
        assert (handed, member.client.commits) == ([0], [])
        member.consumer.death = None

    with_member(test)


@pytest.mark.parametrize(
    ("cause", "policy", "kind"),
    [
        (KafkaError.FENCED_INSTANCE_ID, ReadPolicy(), FatalKafkaError),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, ReadPolicy(replaces_client=False), KafkaUnauthorized),
    ],
)
def test_another_fatal_error_ends_the_member(cause: int, policy: ReadPolicy, kind: type[HeadraceError]) -> None:
    async def test(member: Member) -> None:
        fatal(member.client, cause)
        with pytest.raises(AssertionError, match=r"Fatal error|no right Read on group g"):
            await member.until(lambda: False, "the end of the member")
        assert isinstance(member.consumer.death, kind)
        member.consumer.death = None

    with_member(test, policy=policy)
