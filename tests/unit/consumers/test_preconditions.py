"""What a cluster must hold, judged from what Kafka would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.cli import machine_checks as machine
from headrace.consumers.preconditions import (
    ONE_BROKER,
    Finding,
    Topic,
    judge_brokers,
    judge_dead_letters,
    judge_source,
    judge_topic,
    summarize,
)
from headrace.kafka import PartitionInfo, TopicInfo
from headrace_queries.table_config import TableConfig
from headrace_queries.table_topics import judge_table
from yaml_table import table

DAY_MS = 86_400_000
GOOD = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false", "retention.ms": str(7 * DAY_MS)}


def topic(name: str = "t", replicas: int = 3, in_sync: int = 3, **configs: str) -> Topic:
    partitions = [PartitionInfo(0, 1, range(replicas), range(in_sync))]
    return Topic(TopicInfo(name, partitions), GOOD | {key.replace("_", "."): value for key, value in configs.items()})


def states(findings: Sequence[Finding]) -> dict[str, str]:
    assert all(one.advice for one in findings if one.state != "ok"), "every problem says what to do"
    return {one.check: one.state for one in findings if one.state != "ok"}


@pytest.mark.parametrize(("changes", "expected"), table(__file__, "durability"))
def test_what_an_acknowledged_record_rests_on(changes: dict[str, Any], expected: dict[str, str]) -> None:
    """Three replicas, two of them in sync before an acknowledgement, and no leader that is behind."""
    assert states(list(judge_topic(topic(**changes)))) == expected


@pytest.mark.parametrize(("changes", "forgotten_days", "expected"), table(__file__, "retention"))
def test_what_a_downtime_may_last(changes: dict[str, Any], forgotten_days: int, expected: dict[str, str]) -> None:
    """The records must be there still, and the group's place in them."""
    assert states(list(judge_source(topic(**changes), forgotten_days * DAY_MS, "g"))) == expected


@pytest.mark.parametrize(("changes", "settings", "expected"), table(__file__, "tables"))
def test_a_table_can_be_built_again(
    changes: dict[str, Any], settings: dict[str, Any], expected: dict[str, str]
) -> None:
    """The newest record of each key is in the topic as long as the table has its row; a log has what the topic has."""
    config = TableConfig(topic="t", **settings)
    assert states([judge_table("table stock", config, topic(**changes))]) == expected


def test_dead_letters_wait_longer_than_their_origin() -> None:
    """And none replaces another."""
    assert states(list(judge_dead_letters(topic(), topic()))) == {}
    longer = topic(retention_ms=str(8 * DAY_MS))
    assert states(list(judge_dead_letters(topic(), longer))) == {"retention of dead letters": "warning"}
    assert states(list(judge_dead_letters(topic(cleanup_policy="compact"), topic()))) == {"cleanup.policy": "failing"}


def test_brokers_that_are_missing_are_named() -> None:
    """They are no reason to refuse a start, and what is left of a cluster is not a cluster of one broker."""
    assert judge_brokers(1, []) == ONE_BROKER
    assert (judge_brokers(3, []).state, judge_brokers(3, []).found) == ("ok", "3 brokers")
    assert (judge_brokers(2, [2]).state, judge_brokers(2, [2]).found) == ("warning", "2 of 3: broker 2 is missing")
    assert judge_brokers(1, [2, 3]).found == "1 of 3: brokers 2, 3 are missing"


WARNED = Finding("cluster", "bootstrap servers", "warning", "1", "name two")
FINE = Finding("cluster", "reachable", "ok", "3 brokers")


def test_a_cluster_of_one_broker_has_one_finding_about_replication() -> None:
    """Its topics cannot have more replicas, so one line says it; what else is wrong stays."""
    old = Finding("topic t", "retention", "failing", "1 h", "raise it")
    names = ("replication factor", "min.insync.replicas")
    replication = [Finding(f"topic {topic}", name, "failing", "1", "x") for topic in "tu" for name in names]
    (first, *others) = summarize([WARNED, ONE_BROKER, *replication, old])
    assert (first.about, first.check, first.found) == ("cluster", "number of brokers", "1")
    assert others == [ONE_BROKER, old]
    assert summarize([WARNED, FINE, *replication]) == [WARNED, FINE, *replication]


@pytest.mark.parametrize(("judge", "arguments", "state", "found"), table(__file__, "a_machine"))
def test_a_machine_is_judged_by_what_was_measured(judge: str, arguments: list[Any], state: str, found: str) -> None:
    """At each limit; what is not good has a remedy."""
    finding = getattr(machine, f"judge_{judge}")(*arguments)
    assert (finding.state, finding.found, bool(finding.advice)) == (state, found, state != "ok")
