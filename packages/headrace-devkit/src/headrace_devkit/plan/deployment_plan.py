"""The plan of a deployment: consumers on processes, and what happens when a part is lost."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from headrace.commands.placement.choose import PlacedConsumer, PlacedProcess, choose
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.errors import ConfigError
from headrace_devkit.plan import cost
from headrace_devkit.plan.cost import PLANNED, ConsumerCost, copies_for, cores_of, cost_of, offset_share
from headrace_devkit.plan.rates import ProcessRates, Rates

_MOST_PROCESSES: Final = 10_000
_CELL_PROCESSES: Final = 100
_CELL_CONSUMERS: Final = 2000
_SPARK_PARTITIONS: Final = 2000
"""Most partitions of the pipelines of one Spark."""
_BROKER_SECONDS: Final = 10.0
"""A broker's session of 9 s, and the election of leaders."""
_JOIN_SECONDS: Final = 3.0
"""From the end of a member to the next assignment."""
_PROBE_SECONDS: Final = 30.0
"""The longest pause from one attempt to the next, while a backend is down."""


class PlanRow(NamedTuple):
    """One line of the plan."""

    what: str
    value: str
    why: str


class PlannedDeployment(NamedTuple):
    """What each process has."""

    costs: Sequence[ConsumerCost]
    cores: Sequence[float]
    consumers: Sequence[int]
    partitions: Sequence[int]
    processes: ProcessRates
    zones: Mapping[str, float]
    """Part of the records of each zone."""
    records_per_second: float
    offset_records: float
    """Per second."""

    def cores_of_each(self, processes: float) -> float:
        """Return what each process takes if this many share the work."""
        rest = self.processes.process_millicores + self.processes.consumer_millicores * sum(self.consumers) / processes
        busy, wakes = sum(one.busy for one in self.costs), sum(one.wakes for one in self.costs)
        return rest / 1000 + cores_of(busy / processes, wakes / processes)

    @property
    def threads(self) -> Sequence[float]:
        return [self.processes.process_threads + cost.THREADS_PER_CONSUMER * each for each in self.consumers]

    @property
    def files(self) -> Sequence[int]:
        return [cost.FILES + cost.FILES_PER_CONSUMER * each for each in self.consumers]

    @property
    def megabytes(self) -> Sequence[float]:
        consumers = [cost.MEGABYTES_PER_CONSUMER * each for each in self.consumers]
        partitions = [cost.MEGABYTES_PER_PARTITION * each for each in self.partitions]
        return [self.processes.process_megabytes + sum(each) for each in zip(consumers, partitions, strict=True)]


def plan(consumers: Mapping[str, ReactiveConsumerConfig], rates: Rates) -> list[PlanRow]:
    """Return the plan of consumers at their rates; a consumer without one has no records.

    Raises:
        ConfigError: The rates name a consumer that the file does not have, or there is none.
    """
    found = deployment_of(consumers, rates)
    return [*_size(found, rates), *_commits(found), *_largest(found.costs), *_lost(found, rates, consumers)]


def deployment_of(consumers: Mapping[str, ReactiveConsumerConfig], rates: Rates) -> PlannedDeployment:
    """Choose the processes of each consumer, as many as its rate needs, and return what each process has then.

    Raises:
        ConfigError: The rates name a consumer that the file does not have, or there is none, or they fit no process.
    """
    if unknown := sorted(rates.consumers.keys() - consumers.keys()):
        raise ConfigError(f"the rates name {unknown[0]}, but the configuration has no consumer of this name: remove it")
    if not rates.consumers:
        raise ConfigError("the rates name no consumer: write consumers by name, each with its records_per_second")
    own, costs = rates.processes, list[ConsumerCost]()
    for name, rate in rates.consumers.items():
        once = cost_of(name, consumers[name], rate, own, own.copies)
        copies = min(copies_for(once.cores, own), max(1, rate.partitions))
        costs.append(cost_of(name, consumers[name], rate, own, copies))
    return _placed(costs, rates)


def _placed(costs: Sequence[ConsumerCost], rates: Rates) -> PlannedDeployment:
    own, given = rates.processes, rates.consumers
    rest = own.process_millicores / 1000
    cores = sum(one.cores for one in costs) + sum(one.copies for one in costs) * own.consumer_millicores / 1000
    free = PLANNED * own.cores - rest
    if free <= 0:
        raise ConfigError(f"processes.cores is too small: {PLANNED:.0%} of it is planned, and {rest:g} is used at rest")
    count = own.count or max(2, own.zones, math.ceil(cores / free))
    if count > _MOST_PROCESSES:
        raise ConfigError(
            f"{count:,} processes are more than a plan is made for ({_MOST_PROCESSES:,}): divide the rates"
        )
    if count < own.zones:
        raise ConfigError(f"{count} processes cannot be in {own.zones} zones: raise processes.count or lower zones")
    processes = [PlacedProcess(f"p{n}", f"z{n % own.zones}", own.cores - rest) for n in range(count)]
    placed = [PlacedConsumer(one.name, one.copies, one.cores) for one in costs]
    chosen = choose(placed, processes)
    busy, wakes = (dict.fromkeys((one.name for one in processes), 0.0) for _ in range(2))
    members, lanes, zones = Counter[str](), Counter[str](), dict[str, float]()
    total = sum(rate.records_per_second for rate in given.values())
    zone_of = {one.name: one.zone for one in processes}
    for one in costs:
        rate, names = given[one.name], chosen[one.name]
        for name in names:
            busy[name] += one.busy / len(names)
            wakes[name] += one.wakes / len(names)
            members[name] += 1
            lanes[name] += math.ceil(rate.partitions / len(names))
            part = rate.records_per_second / len(names) / (total or 1)
            zones[zone_of[name]] = zones.get(zone_of[name], 0.0) + part
    most = max(lanes.values())
    offsets = sum(
        one.records_per_second * offset_share(one.records_per_second, one.partitions, most) for one in given.values()
    )
    return PlannedDeployment(
        costs,
        [rest + members[one] * own.consumer_millicores / 1000 + cores_of(busy[one], wakes[one]) for one in busy],
        [members[one] for one in busy],
        [lanes[one] for one in busy],
        own,
        zones,
        total,
        offsets,
    )


def _size(found: PlannedDeployment, rates: Rates) -> list[PlanRow]:
    count = len(found.cores)
    cells = max(math.ceil(count / _CELL_PROCESSES), math.ceil(len(rates.consumers) / _CELL_CONSUMERS))
    groups, members = len(rates.consumers), sum(found.consumers)
    touched = max(found.consumers)
    pipelines = rates.pipelines.values()
    spark = math.ceil(sum(one.partitions for one in pipelines) / _SPARK_PARTITIONS)
    return [
        PlanRow("processes", f"{count}", f"in {cells} cell(s), {rates.processes.zones} zone(s)"),
        PlanRow("cores", f"{sum(found.cores):.2f}", f"of a process: {_spread(found.cores, '.3f')}"),
        PlanRow("threads", _spread(found.threads), "of a process"),
        PlanRow("files", _spread(found.files), "of a process, with one broker"),
        PlanRow("memory", _spread(found.megabytes), "MB of a process, without what waits"),
        PlanRow("group members", f"{members}", f"of {groups} groups"),
        PlanRow("groups of a restart", f"{touched}", f"{touched / groups:.2%} of all groups, at most"),
        PlanRow("groups of a deployment", f"{2 * members}", "joins and leaves; 0 with static members in their session"),
        PlanRow("Spark cells", f"{spark}", f"of at most {_SPARK_PARTITIONS} partitions each"),
    ]


def _commits(found: PlannedDeployment) -> list[PlanRow]:
    total, offsets = found.records_per_second, found.offset_records
    return [
        PlanRow("records per second", f"{total:,.0f}", f"{total * 86400:.3g} a day"),
        PlanRow("offset records", f"{offsets / (total or 1):.1%}", f"of the records: {offsets:,.0f} per second"),
    ]


def _largest(costs: Sequence[ConsumerCost]) -> list[PlanRow]:
    consumer = max(costs, key=lambda one: one.cores)
    partition = max(costs, key=lambda one: (one.partition_load, one.partition_rate))
    key = max(costs, key=lambda one: one.key_load)
    busy = _busy(partition.partition_load, f"{partition.partition_rate:.1f}/s")
    rows = [
        PlanRow("largest consumer", consumer.name, f"{consumer.cores:.2f} cores in {consumer.copies} processes"),
        PlanRow("largest partition", partition.name, busy),
    ]
    shown = _busy(key.key_load, "one delivery at a time") if key.key_load else "no ordered key has a known share"
    return [*rows, PlanRow("largest key", key.name if key.key_load else "-", shown)]


def _busy(load: float, what: str) -> str:
    return f"{what}, busy {load:.0%}" + (": its lag grows" if load >= 1 else "")


def _lost(found: PlannedDeployment, rates: Rates, consumers: Mapping[str, ReactiveConsumerConfig]) -> list[PlanRow]:
    count, zones = len(found.cores), rates.processes.zones
    seconds = max(_session_seconds(consumers[name]) for name in rates.consumers) + _JOIN_SECONDS
    zone = max(found.zones.values(), default=0.0)
    left = found.cores_of_each(count - count / zones) if zones > 1 else math.inf
    memory = max(found.consumers) * max(consumers[name].flow.max_bytes for name in rates.consumers) / 1e6
    probes = sum(one.copies for one in found.costs) / _PROBE_SECONDS
    after = f"; then {left:.2f} cores of a process" if zones > 1 else "; nothing is left"
    return [
        PlanRow("a process is killed", f"{seconds:g} s", f"delay of {1 / count:.1%} of the records"),
        PlanRow("a zone is lost", f"{seconds:g} s", f"delay of {zone:.1%} of the records{after}"),
        PlanRow("a broker is lost", f"{_BROKER_SECONDS:g} s", "delay of the partitions that it leads"),
        PlanRow("backends down: probes", f"{probes:.1f}", "per second, of all"),
        PlanRow("backends down: memory", f"{memory:,.0f}", "MB of a process at most, twice that with what is fetched"),
    ]


def _session_seconds(settings: ReactiveConsumerConfig) -> float:
    return int(str(settings.consumer.properties.get("session.timeout.ms", 10_000))) / 1000


def _spread(values: Sequence[float], form: str = ".0f") -> str:
    return f"{statistics.fmean(values):{form}} mean, {max(values):{form}} max"
