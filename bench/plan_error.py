"""How far `headrace plan` is from a real run at 1/1000 of 4,000 consumers and 764,000 records a second.

`python -m bench.plan_error` measures this machine with one consumer, and without one; plans four consumers on two
processes with these figures; runs them; and prints the error of each figure.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import Producer

from bench.environment import Bench, pid
from bench.machine import Meter
from bench.measured import table
from bench.offset_commits import offset_records
from bench.push import Sink
from bench.sizing import megabytes
from headrace.config.consumers import ReactiveConsumerConfig
from headrace_devkit.devcluster import Cluster, HeadraceProcess
from headrace_devkit.plan import cost
from headrace_devkit.plan.deployment_plan import deployment_of
from headrace_devkit.plan.rates import ConsumerRate, ProcessRates, Rates

PROCESSES, SECONDS, SETTLED_SECONDS, WARM_SECONDS = 2, 30, 8.0, 12
WEIGHTS = (435, 232, 161, 123)
"""The largest consumers of 4,000 under Pareto's law with 1.1, relative to each other."""
ALL = {f"c{n}": ConsumerRate(764 * w / sum(WEIGHTS), 500 * w // sum(WEIGHTS)) for n, w in enumerate(WEIGHTS)}
ONE = {"one": ConsumerRate(400.0, 250)}


class Found(NamedTuple):
    """What processes took, per process where it is not a share."""

    cores: float
    threads: float
    files: float
    megabytes: float
    offsets: float
    """Offset records per record."""


def produce(bench: Bench, load: Mapping[str, ConsumerRate], topics: Mapping[str, str], seconds: float) -> int:
    """Write records at the rates, to the partitions of each topic in turn; return how many."""
    producer = Producer({"bootstrap.servers": bench.cluster.bootstrap_servers, "linger.ms": 2})
    begun, written = time.monotonic(), dict.fromkeys(load, 0)
    while (passed := time.monotonic() - begun) < seconds:
        for name, rate in load.items():
            for number in range(written[name], int(passed * rate.records_per_second)):
                producer.produce(topics[name], b"x" * rate.record_bytes, partition=number % rate.partitions)
                written[name] += 1
        producer.poll(0)
        time.sleep(0.005)
    producer.flush(30)
    return sum(written.values())


def measured(bench: Bench, load: Mapping[str, ConsumerRate], processes: int) -> Found:
    """Run consumers at their rates."""
    topics = {name: bench.topic(name, rate.partitions) for name, rate in load.items()}
    total = sum(rate.records_per_second for rate in load.values())
    with Sink(int(total * (SECONDS + WARM_SECONDS) * 2)) as sink:
        url = f"http://127.0.0.1:{sink.port}/"
        own = {n: {"topics": [t], "group": f"{n}-{time.time_ns()}", "backend": {"url": url}} for n, t in topics.items()}
        running = [bench.headrace({"reactive_consumers": own}) for _ in range(processes)]
        time.sleep(SETTLED_SECONDS)
        produce(bench, load, topics, WARM_SECONDS)  # each partition has committed once
        meters, before = [Meter(pid(one)) for one in running], offset_records(bench.cluster.bootstrap_servers)
        begun = time.monotonic()
        written = produce(bench, load, topics, SECONDS if load else 10)
        seconds = time.monotonic() - begun
        used = [meter.used()[0] for meter in meters]
        offsets = offset_records(bench.cluster.bootstrap_servers) - before
        found = Found(sum(used) / seconds / processes, *at_rest(running), offsets / max(1, written))
        for one in running:
            one.terminate()
    return found


def at_rest(running: Sequence[HeadraceProcess]) -> tuple[float, float, float]:
    """Return threads, files and megabytes of a process."""
    roots = [pid(one) for one in running]
    threads = [
        int(found[1])
        for root in roots
        if (found := re.search(r"^Threads:\s+(\d+)", Path(f"/proc/{root}/status").read_text(), re.MULTILINE))
    ]
    files = [len(list(Path(f"/proc/{root}/fd").iterdir())) for root in roots]
    memory = [*map(megabytes, roots)]
    return tuple(sum(each) / len(each) for each in (threads, files, memory))  # type: ignore[return-value]


def planned(load: Mapping[str, ConsumerRate], costs: ProcessRates) -> Found:
    """Return what `headrace plan` says."""
    one: dict[str, Any] = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost:1/"}}
    consumers = {name: ReactiveConsumerConfig.model_validate(one) for name in load}
    planned_figures = deployment_of(consumers, Rates(dict(load), {}, costs))
    return Found(
        fmean(planned_figures.cores),
        fmean(planned_figures.threads),
        fmean(planned_figures.files),
        fmean(planned_figures.megabytes),
        planned_figures.offset_records / planned_figures.records_per_second,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), 1.0)
        idle, one = measured(bench, {}, 1), measured(bench, ONE, 1)
        costs = ProcessRates(count=1, copies=1, process_millicores=idle.cores * 1000)
        scale = (one.cores - idle.cores) / (planned(ONE, costs).cores - idle.cores)
        rest = {
            "process_threads": one.threads - cost.THREADS_PER_CONSUMER,
            "process_megabytes": one.megabytes - cost.MEGABYTES_PER_CONSUMER,
        }
        names = ("record_microseconds", "delivery_microseconds", "fetch_microseconds", "partition_microseconds")
        here = {name: getattr(costs, name) * scale for name in names}
        costs = msgspec.structs.replace(costs, count=PROCESSES, copies=PROCESSES, **here, **rest)
        planned_figures, found = planned(ALL, costs), measured(bench, ALL, PROCESSES)
    figures = {name: (getattr(planned_figures, name), getattr(found, name)) for name in Found._fields}
    errors = {name: planned_figures / found - 1 for name, (planned_figures, found) in figures.items()}
    rows = [
        f"{name} | {planned_figures:.3f} | {found:.3f} | {errors[name]:+.0%}"
        for name, (planned_figures, found) in figures.items()
    ]
    print("\n".join(table("figure, of a process | planned | measured | error", rows)))
    print(f"at rest {idle.cores:.3f} cores; processor figures x {scale:.2f}; largest error", end=" ")
    print(f"{max(map(abs, errors.values())):.0%}" if not any(map(math.isnan, errors.values())) else "unknown")


if __name__ == "__main__":
    main()
