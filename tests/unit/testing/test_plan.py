"""`headrace plan`: what a configuration needs at given rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.errors import ConfigError
from headrace_devkit.plan.cost import offset_share
from headrace_devkit.plan.deployment_plan import deployment_of, plan
from headrace_devkit.plan.plan_command import plan_command
from headrace_devkit.plan.rates import ConsumerRate, ProcessRates, Rates, read_rates


def consumer(**settings: Any) -> ReactiveConsumerConfig:
    return ReactiveConsumerConfig.model_validate(
        {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost:1/"}, **settings}
    )


def test_four_thousand_consumers_on_two_hundred_processes() -> None:
    """By Pareto's law: few threads in a process, few groups in a restart, few offset records."""
    weights = [(n + 1) ** (-1 / 1.1) for n in range(4000)]
    rates = {
        f"c{n}": ConsumerRate(764_000 * weight / sum(weights), max(2, round(500_000 * weight / sum(weights))))
        for n, weight in enumerate(weights)
    }
    own = consumer(consumer={"properties": {"fetch.min.bytes": 50_000, "fetch.wait.max.ms": 100}})
    found = deployment_of(dict.fromkeys(rates, own), Rates(rates, {}, ProcessRates(count=200, zones=3)))
    assert max(found.threads) <= 400
    assert max(found.consumers) / 4000 <= 0.015
    assert found.offset_records / found.records_per_second <= 0.03
    assert max(found.cores) <= 0.75


def test_many_partitions_with_few_records_cost_requests() -> None:
    """The client names all its partitions in each request, and asks again after each record unless it waits."""
    rates = Rates({"a": ConsumerRate(400, 250)}, {}, ProcessRates(count=1, copies=1))
    waits = consumer(consumer={"properties": {"fetch.min.bytes": 50_000, "fetch.wait.max.ms": 100}})
    at_once, later = (deployment_of({"a": one}, rates).cores[0] - 0.01 for one in (consumer(), waits))
    assert at_once > 2 * later


@pytest.mark.parametrize(
    ("partitions", "share"), [(10, 0.86), (1000, 0.0234)], ids=["every 0.2 s", "after 28.5 s of 1,000 partitions"]
)
def test_the_part_of_offset_records_follows_the_time_between_commits(partitions: int, share: float) -> None:
    assert offset_share(1.5 * partitions, partitions, partitions) == pytest.approx(share, rel=0.02)


def test_a_key_or_partition_that_is_too_large_is_named() -> None:
    """One key is delivered one by one, and a partition in order one batch at a time."""
    consumers = {"keys": consumer(ordering="key"), "slow": consumer(batch={"max_records": 1})}
    rates = {"keys": ConsumerRate(1000, 8, 0.05, largest_key=0.1), "slow": ConsumerRate(10, 2, 0.3)}
    rows = {row.what: row for row in plan(consumers, Rates(rates))}
    assert rows["largest key"][1:] == ("keys", "one delivery at a time, busy 500%: its lag grows")
    assert rows["largest partition"][1:] == ("slow", "5.0/s, busy 150%: its lag grows")


def test_a_file_that_is_not_valid_is_refused(tmp_path: Path) -> None:
    file, rates = tmp_path / "headrace.yaml", tmp_path / "rates.yaml"
    file.write_text("reactive_consumers: {a: {topics: [t], group: g, backend: {url: 'http://localhost:1/'}}}")
    for text, says in (
        ("consumers: {a: {records_per_second: 1}}", "missing required field `partitions`"),
        ("consumers: {a: {records_per_second: 1, partitions: 2, largest_key: 2}}", "<= 1.0 - at .*largest_key"),
        ("consumers: {a: {records_per_second: .nan, partitions: 2}}", ">= 0.0 - at .*records_per_second"),
        ("consumers: {a: {records_per_second: 1, partitions: 1000000000}}", "<= 1000000 - at .*partitions"),
        ("consumers: {a: {records_per_second: 1, partitions: 2, record_bytes: 0}}", ">= 1 - at .*record_bytes"),
        ("processes: {zones: 0}", ">= 1 - at .*zones"),
        ("processes: {cores: 0}", "> 0.0 - at .*cores"),
        ("processes: {count: 1000000000}", "<= 10000 - at .*count"),
    ):
        rates.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_rates(rates)
    for given, says in (({"b": ConsumerRate(1, 2)}, "no consumer of this name"), ({}, "name no consumer")):
        with pytest.raises(ConfigError, match=says):
            plan({"a": consumer()}, Rates(given))
    for processes, says in (
        (ProcessRates(cores=0.005), "processes.cores is too small"),
        (ProcessRates(record_microseconds=1e9), "more than a plan is made for"),
        (ProcessRates(count=1, zones=3), "cannot be in 3 zones"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan({"a": consumer()}, Rates({"a": ConsumerRate(1000, 2)}, {}, processes))
    one = "consumers: {a: {records_per_second: 1, partitions: 2}}"
    rates.write_text(f"{one}\npipelines: {{p: {{records_per_second: 9, partitions: 4001}}}}")
    done = CliRunner().invoke(plan_command, [str(file), "--rates", str(rates)])
    assert "Spark cells             3" in done.output, done.output
